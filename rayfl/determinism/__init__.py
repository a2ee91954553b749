"""The same bits every time: seeds, the order of additions, torch's flags, the process and the platform."""
