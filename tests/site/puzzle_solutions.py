"""A solution of each puzzle, within its budget: two rows for each rank, and a point is an empty step."""

SOLUTIONS = {
    "one_step": """
        . F0a F1a B1a B0a U0 U1
        La
    """,
    "accumulate": """
        . F0a F1a B1a B0a F0b F1b B1b U1 B0b U0
        La . . . Lb
    """,
    "recompute": """
        . F0a F1a F2a F3a B3a U3 B2a U2 F0a B1a B0a U0 U1
        La . . -x0a -x1a . . . La
    """,
    "data_parallel": """
        . F0a F1a B1a . B0a . U1 U0
        La . . . RSg1 AGg1 RSg0 AGg0
        . F0b F1b B1b . B0b . U1 U0
        Lb . . . RSg1 AGg1 RSg0 AGg0
    """,
    "overlap": """
        . F0a F1a F2a B2a . B1a . B0a U1 U2 U0
        La . . . . RSg2 AGg2 RSg1 AGg1 RSg0 AGg0
        . F0b F1b F2b B2b . B1b . B0b U1 U2 U0
        Lb . . . . RSg2 AGg2 RSg1 AGg1 RSg0 AGg0
    """,
    "zero1": """
        . F0a F1a B1a B0a U1 U0
        La . . -w1 RSg1 RSg0 AGw1 AGw0
        . F0b F1b B1b B0b U1 U0
        Lb . . -w1 RSg1 RSg0 AGw1 AGw0
    """,
    "zero3": """
        . . . F0a F1a F2a B2a F0a U2 B1a B0a U1 U0
        La AGw0 AGw1 AGw2 -x1a -w1 -w2 RSg2 AGw1 -w1 RSg1 RSg0
        . . . F0b F1b F2b B2b F0b U2 B1b B0b U1 U0
        Lb AGw0 AGw1 AGw2 -x1b -w1 -w2 RSg2 AGw1 -w1 RSg1 RSg0
    """,
    "pipeline": """
        . F0a F0b . . F0c F0d . . . . B0a B0b B0c B0d U0
        La Lb x1a>1 x1b>1 Lc Ld x1c>1 x1d>1
        . . . F1a F1b . . F1c F1d B1a B1b B1c B1d U1
        . . . . . . . . . . d1a>0 d1b>0 d1c>0 d1d>0
    """,
    "one_f_one_b": """
        . F0a F0b . . F0c B0a F0d B0b . B0c . B0d U0
        La Lb x1a>1 x1b>1 Lc Ld x1c>1 . x1d>1
        . . . F1a B1a F1b B1b F1c B1c F1d B1d U1
        . . . . . d1a>0 . d1b>0 . d1c>0 . d1d>0
    """,
    "sharded_stages": """
        . . F0a F1a F0b F1b . . . . B1a B0a . . B1b B0b U1 U0
        La AGw0 AGw1 Lb x2a>2 . x2b>2 . . . . . . . . RSg1 RSg0
        . . F0c F1c F0d F1d . . . . B1c B0c . . B1d B0d U1 U0
        Lc AGw0 AGw1 Ld x2c>3 . x2d>3 . . . . . . . . RSg1 RSg0
        . . . . . F2a F3a B3a B2a F2b F3b B3b B2b . U3 U2
        . . . AGw2 . AGw3 . . . d2a>0 . . RSg3 d2b>0 RSg2
        . . . . . F2c F3c B3c B2c F2d F3d B3d B2d . U3 U2
        . . . AGw2 . AGw3 . . . d2c>1 . . RSg3 d2d>1 RSg2
    """,
}
