"""What breaks an environment. Harbor records the names of these types, and `blame` reads them."""


class SandboxDiedError(Exception):
    """The environment ended before it was stopped: out of memory, or killed."""


class DockerUnreachableError(Exception):
    """The Docker engine does not answer."""


class ImageMissingError(Exception):
    """A task's image is neither here nor to be had."""


class SealError(Exception):
    """What the agent did to its environment keeps it from being graded safely."""
