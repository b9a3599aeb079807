"""Validation: the model beside measurements that others published."""
