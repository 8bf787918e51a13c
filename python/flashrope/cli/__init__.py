"""What the commands share: options, progress, reports, files. Loads torch only where a device is asked for."""
