"""Objects in separate processes on this machine, without Ray: `process` is the driver's side, `serving` the child's
side, `output` redirects what a process prints."""
