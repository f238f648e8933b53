"""`gradtrace verify`: can the scores of this run be trusted?"""
