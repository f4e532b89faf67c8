"""The wire formats that agents speak, one file each. They translate, and decide nothing."""
