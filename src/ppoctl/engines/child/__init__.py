"""Objects in processes of their own on this machine, without Ray: `process` is the driver's side, `serving` the
other; `output`: where one that was started by others prints."""
