"""What the scheduler is compared with: simpler policies on the same core."""

from __future__ import annotations

from supervisor.core.admission.admission import AdmissionPolicy


class Fifo(AdmissionPolicy):
    """First come, first served, whoever asks: no classes, no shares, no minimum residency."""

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
    """And the least recently used goes first, whatever it costs to load it again."""

    def value(self, reload_s, idle_s):
        return -idle_s


POLICIES = {"llmux": AdmissionPolicy, "FIFO": Fifo, "FIFO, plain LRU": Lru}
