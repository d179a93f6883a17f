/* Places where the tests' build ends the process, as a crash would (tests/fault/test_crash.c); nothing anywhere else. */
#ifndef RETRIEVALD_FAULT_H
#define RETRIEVALD_FAULT_H

#ifdef ENG_FAULT_POINTS
void eng_fault_point(const char *name);
#else
#define eng_fault_point(name) ((void)0)
#endif

#endif
