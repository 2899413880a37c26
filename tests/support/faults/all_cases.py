"""The fifteen, by their number."""

from tests.support.faults import data_cases, model_cases, run_cases

FAULTS = sorted((*data_cases.FAULTS, *run_cases.FAULTS, *model_cases.FAULTS), key=lambda fault: fault.number)
