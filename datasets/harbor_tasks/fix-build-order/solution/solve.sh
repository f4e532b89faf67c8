#!/bin/sh
cp /solution/order.py /app/order.py
