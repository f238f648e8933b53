"""Does a score predict training? Real optimizer steps on parts of a batch, measured, beside what scores said of
them."""
