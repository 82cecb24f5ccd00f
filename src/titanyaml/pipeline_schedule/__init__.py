"""Schedules of pipeline parallelism as plain data, without torch, so that the command line can check them."""
