"""Is the optimizer state on the ranks what it should be?

inventory lists what a rank holds (own: of an optimizer of ours), pieces are its items; coverage and
verdicts judge the pieces of all ranks by their fingerprints; details measures what differs; report
is the result, words and plot show it. collective does that over a process group, local over
inventories of files (command, files), watch every k steps of an optimizer of ours.
"""
