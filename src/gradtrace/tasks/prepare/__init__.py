"""Known data sets, made ready for training: `recipes` say how to read a row, `files` cleans, splits and writes."""
