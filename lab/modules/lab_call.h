/* SPDX-License-Identifier: GPL-2.0-only */
/* What the agent asks of lab_call: the ioctl of /dev/lab_call. */
#ifndef LAB_CALL_H
#define LAB_CALL_H

#include <linux/ioctl.h>
#include <linux/types.h>

struct lab_call {
	__u32 function;		/* SMCCC's number */
	__u32 argument;		/* W1 */
	__u64 times;		/* so often, 1 to 1000000 */
	__u64 result;		/* X0 of the last one */
	__u64 ns;		/* all of them took */
};

#define LAB_CALL	_IOWR(0xcf, 0x40, struct lab_call)

#endif
