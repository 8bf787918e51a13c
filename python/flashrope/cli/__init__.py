"""Code that the commands share: options, progress, reports and files. It loads torch only to find a device."""
