"""`llmux bench`: send the same requests to a model on each device, through a temporary second worker, and compare.

The command runs that worker itself, one device after the other, with the daemon's own parts: the adapter's launch, the
shim, the health checks, the port's ownership check, the memory samplers. It needs no daemon and doesn't disturb one that
runs: no model appears in its list, nothing is evicted, no client's request waits. A model inside the daemon would need new
concepts in the scheduler for something that takes minutes.

Two checks keep the memory honest. Before a start, the model's estimate must fit into what the device is *measured* to have
free, less its margin, and, where a daemon answers, into the room that its ledger has for a new lease: the ledger subtracts
memory that its workers hold but don't use yet, and refuses a device that it is loading on. After that, the daemon sees the worker
as it sees every other program on the device. One gap remains: a load that the daemon begins within the seconds of ours.

Nothing outlives the command: the shim kills the worker when its parent dies, however it dies.

    devices            the devices of this machine, and the check of their memory
    temporary_worker   one worker, from its start to its end
    page               the page that --ocr shows
    workloads          the requests, and how they are measured
    comparison         all devices in turn, the table and the ratio
"""
