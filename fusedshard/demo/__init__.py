"""`fusedshard demo`: the same small job four ways, and what the ranks share.

command starts the ranks and follows them; train is what each of them does; verdicts says what must
hold; report and plot show it; model is the GPT and its text.
"""
