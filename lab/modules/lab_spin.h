/* SPDX-License-Identifier: GPL-2.0-only */
/* Passing time on the CPU, for a host whose clock counts instructions. */
#ifndef LAB_SPIN_H
#define LAB_SPIN_H

#include <asm/arch_timer.h>
#include <linux/compiler.h>
#include <linux/time64.h>
#include <linux/types.h>

/*
 * Keep this CPU busy for @ns nanoseconds. No tracing, no RCU, no locks, so
 * that it can be used while the CPU counts as idle.
 *
 * There is no cpu_relax() in it: there the emulator runs another CPU, and a
 * spinning CPU would cost the others less than a working one.
 *
 * Each read of the counter leaves the emulator's translated code, so the
 * time is passed in a plain loop of about half of what is left, over and over.
 * A round of it is two instructions: 4 ns at 2 ns an instruction.
 */
static __always_inline void lab_spin_ns(u64 ns)
{
	u64 tick_ns = max(NSEC_PER_SEC / arch_timer_get_cntfrq(), 1UL);
	u64 end = __arch_counter_get_cntvct() + ns / tick_ns;
	u64 rounds;
	s64 left;

	while ((left = end - __arch_counter_get_cntvct()) > 0)
		for (rounds = left * tick_ns / 8; rounds; rounds--)
			barrier();
}

#endif
