"""Objects in separate processes on this machine, without Ray: `process` is the driver's side, `serving` is the
child's side, and `output` redirects what a process prints."""
