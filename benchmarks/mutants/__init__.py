"""Small defects, one at a time: do the tests notice them?"""
