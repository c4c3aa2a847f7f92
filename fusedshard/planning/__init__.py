"""What training takes, before anything is allocated: `fusedshard plan`.

::

    sizes     quantities as people write them, and back
    models    the parameters: of a file, or of a transformer of a given size
    usage     what one way to train takes on a rank
    ours      fusedshard's ways
    torchs    torch's: DDP, ZeroRedundancyOptimizer, FSDP2
    plan      all ways beside each other, and the fewest ranks of each
    words     the plan in words
    command   the command
"""
