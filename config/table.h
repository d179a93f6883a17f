/* Private to config/: one row of the table for each setting, or for each meaning that a flag has in different commands. */
#ifndef RETRIEVALD_CONFIG_TABLE_H
#define RETRIEVALD_CONFIG_TABLE_H

#include "config.h"

typedef enum {
    CFG_T_U32,
    CFG_T_I32,
    CFG_T_I64,
    CFG_T_REAL,
    CFG_T_TEXT,    /* char *, not empty */
    CFG_T_TEXTS,   /* char *; each time the flag is given adds a line */
    CFG_T_CHOICE,  /* char *, one of `choices` */
    CFG_T_CHOICES, /* char *, some of `choices`, separated by commas */
    CFG_T_COUNT,   /* char *, one of `choices` or a whole number in [lo, hi] */
    CFG_T_NUMBERS, /* char *, whole numbers in [lo, hi], separated by commas */
    CFG_T_SWITCH,  /* bool, takes no value */
    CFG_T_CONFIG,  /* --config itself: no field */
} cfg_type;

typedef struct {
    const char *group; /* heading in the help */
    const char *name;  /* --name, the file's key, RETRIEVALD_NAME */
    const char *short_name;
    unsigned commands;
    bool everywhere; /* may also come from the file and the environment; else a flag only */
    cfg_type type;
    size_t field;        /* offset in cfg_settings */
    const char *initial; /* as it would be written; NULL: none */
    double lo, hi;
    const char *const *choices; /* ends with NULL */
    const char *arg, *help;
} cfg_row;

extern const cfg_row cfg_table[];
extern const size_t cfg_table_rows;

#endif
