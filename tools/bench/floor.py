def run_floor(b, c):
    return True
