"""Code that the commands share: options, progress, reports and files. This package loads torch only to find a
device."""
