/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What a thread uses of a CPU, as schedutil has it.
 */
#ifndef VCPUFREQ_UTIL_H
#define VCPUFREQ_UTIL_H

#include <linux/sched.h>

#define UTIL_AVG_UNCHANGED	0x80000000	/* of kernel/sched: a flag in util_est */

extern const struct rq runqueues __ksym;

/* A CPU's average has the time of all such threads, and they have none of their own. */
static __always_inline bool is_rt_or_deadline(const struct task_struct *p)
{
	return p->policy == SCHED_DEADLINE || p->policy == SCHED_FIFO || p->policy == SCHED_RR;
}

/* The thread's utilization on the CPU that `rq` is of: the larger of average and estimate. */
static __always_inline __u32 own_util(const struct task_struct *p, const struct rq *rq)
{
	__u32 own = p->se.avg.util_avg, estimate;

	if (is_rt_or_deadline(p))
		return p->policy == SCHED_DEADLINE ? rq->avg_dl.util_avg : rq->avg_rt.util_avg;
	/* A structure before Linux 6.8. */
	if (!bpf_core_field_exists(p->se.avg.util_est))
		return own;
	estimate = p->se.avg.util_est & ~UTIL_AVG_UNCHANGED;
	return estimate > own ? estimate : own;
}

#endif /* VCPUFREQ_UTIL_H */
