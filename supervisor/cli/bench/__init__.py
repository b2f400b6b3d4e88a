"""`llmux bench`: the same requests to a model on each device, by a temporary second worker, and what came of it.

The command runs that worker itself, one device after the other, with the daemon's own parts: the adapter's launch, the
shim, the health checks, the port's ownership check, the memory samplers. No daemon is needed, and one that runs is left
as it is: no model appears in its list, nothing is evicted, no request of a client waits. A model inside the daemon would
have needed all of that said to the scheduler, for something that is over within minutes.

Memory is kept honest from both sides. Before a start, the model's estimate must fit into what the device is *measured*
to have free, less its margin, and, where a daemon answers, into what its ledger says a new lease may take: that leaves
out what its workers hold but don't use yet, and refuses a device that it is loading on. From then on the daemon sees the
worker as every outside user of the device. What remains is a load that the daemon begins within the seconds of ours.

Nothing outlives the command: the shim ends the worker when its parent dies, however it dies.

    places       which devices there are, and whether there is room
    trial        one temporary worker, from its start to its end
    exercises    what is asked of it, and how that is measured
    comparison   all devices in turn, the table and the ratio
"""
