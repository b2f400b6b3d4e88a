"""Simpler policies on the same core, to compare the scheduler with."""

from __future__ import annotations

from supervisor.core.admission.admission import AdmissionPolicy


class Fifo(AdmissionPolicy):
    """First come, first served: no classes, no shares, no minimum residency."""

    def next_request(self, heads):
        return min(heads, key=lambda head: head.seq)

    def rank_model(self, model, queue):
        waiting = [(each.arrived_at, each.seq) for each in queue.oldest_of_classes(model.id)]
        return (*min(waiting, default=(float("inf"), 0)),)

    def keeps_place_until(self, model, queue, now):
        return now

    def may_claim_at(self, waiter, queue, victim):
        return float("-inf")

    def yields_at(self, victim, waiter, queue):
        return float("-inf")

    def kept_for_user_until(self, model):
        return float("-inf")

    def users(self, uses):
        return dict.fromkeys(uses, 0)

    def is_urgent(self, waiter, priority, victim):
        return False


class Lru(Fifo):
    """Like `Fifo`, but evict the least recently used model, without regard to the cost of reloading."""

    def value(self, reload_s, idle_s):
        return -idle_s


POLICIES = {"llmux": AdmissionPolicy, "FIFO": Fifo, "FIFO, plain LRU": Lru}
