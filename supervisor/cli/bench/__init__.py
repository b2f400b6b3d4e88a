"""`llmux bench`: send the same requests to a model on each device, through a temporary second worker, and compare.

The command runs that worker itself, one device after the other, with the daemon's own parts: the adapter's launch, the
shim, the health checks, the port's ownership check, the memory samplers. It needs no daemon and doesn't disturb a
running one: the daemon lists no further model, evicts nothing and lets no client's request wait. A model inside the daemon
would need new concepts in the scheduler for a measurement that takes minutes.

Two checks keep the memory honest. Before a start, the model's estimate must fit into the free memory that is *measured* on the
device, less the margin, and, where a daemon answers, into the room that its ledger has for a new lease: the ledger subtracts
memory that the daemon's workers hold but don't use yet, and refuses a device on which a model is loading. After that, the
daemon counts the worker like every other program on the device. One gap remains: a load that the daemon begins during ours.

Nothing outlives the command: the shim kills the worker when the command dies, in whatever way.

    devices            the devices of this machine, and the check of their memory
    temporary_worker   one worker, from its start to its end
    page               the page that --ocr shows
    workloads          the requests, and how they are measured
    comparison         all devices in turn, the table and the ratio
"""
