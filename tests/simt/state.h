/* What the emulator's files share about the options. */
#ifndef RETRIEVALD_SIMT_STATE_H
#define RETRIEVALD_SIMT_STATE_H

#include "emu.h"

extern emu_options emu_now;
uint64_t emu_random();
/* Whether a fault is kept instead of aborting; the device is lost then. */
bool emu_caught(const char *text);

#endif
