"""What travels with a record."""

import pickle

import torch

from ppoctl.batch.records import Values


def test_a_record_on_its_way_to_another_process_leaves_its_encoding_behind() -> None:
    record = Values(values=torch.arange(6.0).view(2, 3), stamp="critic@0:0")
    fresh = pickle.dumps(record)
    encoded, identity = record.encoded, record.identity
    assert len(pickle.dumps(record)) == len(fresh)
    arrived = pickle.loads(fresh)
    assert torch.equal(arrived.values, record.values)
    assert (arrived.encoded, arrived.identity) == (encoded, identity)
