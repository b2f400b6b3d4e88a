"""Devices and their memory, as drivers and the kernel show these."""
