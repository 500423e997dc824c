// SPDX-License-Identifier: GPL-2.0-only
/*
 * Puts clamps into force, where sleeping is allowed.
 *
 * A group's clamp is changed on the run queue, in place: the host's frequency
 * doesn't move but to where it is asked for. sched_setattr takes the thread
 * off the run queue and puts it back, and the frequency follows (dips) when
 * nothing else holds it. So the thread is for hosts without a cgroup only.
 */
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/log2.h>
#include <linux/math.h>
#include <linux/sched.h>
#include <linux/timekeeping.h>
#include <uapi/linux/sched/types.h>

#include "vcpufreq_host.h"

/*
 * In percent with two digits, as the files have it; the kernel rounds it back.
 * By hand: the guest waits, and printf takes as long as the rest of this.
 */
static int vcpufreq_write(struct file *file, u32 util)
{
	u32 percent = DIV_ROUND_CLOSEST(util * 10000, 1024);
	char text[] = "000.00";
	const int len = sizeof(text) - 1;
	loff_t pos = 0;
	ssize_t ret;
	int i;

	for (i = len - 1; percent; i--) {
		if (text[i] == '.')
			continue;
		text[i] += percent % 10;
		percent /= 10;
	}
	ret = kernel_write(file, text, len, &pos);
	if (ret < 0)
		return ret;
	return ret == len ? 0 : -EIO;
}

/* A floor above the ceiling counts for nothing: the one that makes room is first. */
static int vcpufreq_clamp_group(struct vcpufreq_domain *domain, u32 clamp)
{
	u32 min = VCPUFREQ_CLAMP_MIN(clamp), max = VCPUFREQ_CLAMP_MAX(clamp);
	u32 old_min = VCPUFREQ_CLAMP_MIN(domain->force);
	u32 old_max = VCPUFREQ_CLAMP_MAX(domain->force);
	int ret = 0;

	if (max > old_max)
		ret = vcpufreq_write(domain->max, max);
	if (!ret && min != old_min)
		ret = vcpufreq_write(domain->min, min);
	if (!ret && max < old_max)
		ret = vcpufreq_write(domain->max, max);
	if (!ret)
		domain->force = clamp;
	return ret;
}

/*
 * In the kernel, unlike in the system call, what isn't given isn't kept. The
 * run time of a fair thread is its slice.
 */
static int vcpufreq_clamp_current(u32 clamp)
{
	struct sched_attr attr = {
		.size = sizeof(attr),
		.sched_policy = current->policy,
		.sched_flags = SCHED_FLAG_UTIL_CLAMP,
		.sched_nice = task_nice(current),
		.sched_priority = current->rt_priority,
		.sched_util_min = VCPUFREQ_CLAMP_MIN(clamp),
		.sched_util_max = VCPUFREQ_CLAMP_MAX(clamp),
	};

	if (current->policy == SCHED_DEADLINE)
		return -EOPNOTSUPP;
	if (current->sched_reset_on_fork)
		attr.sched_flags |= SCHED_FLAG_RESET_ON_FORK;
	if (current->se.custom_slice)
		attr.sched_runtime = current->se.slice;
	return sched_setattr_nocheck(current, &attr);
}

/**
 * vcpufreq_clamp - put into force what a domain wants by now
 * @domain: the domain
 * @since_ns: when that was asked for
 *
 * Return: 0, or what the scheduler said.
 */
int vcpufreq_clamp(struct vcpufreq_domain *domain, u64 since_ns)
{
	struct vcpufreq_host_stats *stats = &domain->stats;
	u32 clamp;
	u64 took;
	int ret;

	mutex_lock(&domain->lock);
	clamp = READ_ONCE(domain->wanted);
	if (domain->by == VCPUFREQ_HOST_THREAD)
		ret = vcpufreq_clamp_current(clamp);
	else
		ret = vcpufreq_clamp_group(domain, clamp);
	if (ret) {
		stats->refused++;
		stats->last_error = ret;
	} else {
		took = ktime_get_ns() - since_ns;
		stats->applied++;
		stats->after_ns[min(ilog2(took | 1), VCPUFREQ_HOST_BUCKETS - 1)]++;
	}
	mutex_unlock(&domain->lock);
	return ret;
}
