// SPDX-License-Identifier: GPL-2.0-only
/*
 * Puts clamps into force, where sleeping is allowed.
 *
 * A group's clamp is changed on the run queue, in place: the host's frequency
 * doesn't move but to where it is asked for. sched_setattr would take the thread
 * off the run queue and put it back, and the frequency would follow (dip) when
 * nothing else holds it.
 */
#include <linux/cgroup.h>
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/log2.h>
#include <linux/math.h>
#include <linux/sched.h>
#include <linux/sched/rt.h>
#include <linux/timekeeping.h>
#include <linux/uio.h>

#include "internal.h"

/*
 * Straight to the file's own function, as other writers in the kernel do it:
 * permission was checked when the file was opened and bound, and a cgroup's
 * files can't be frozen. kernel_write repeats it, which takes the guest 0.8 µs.
 */
static int vcpufreq_write_text(struct file *file, const char *text, size_t len)
{
	struct kvec vec = { .iov_base = (void *)text, .iov_len = len };
	struct iov_iter from;
	struct kiocb iocb;
	ssize_t ret;

	init_sync_kiocb(&iocb, file);
	iov_iter_kvec(&from, ITER_SOURCE, &vec, 1, len);
	ret = file->f_op->write_iter(&iocb, &from);
	if (ret < 0)
		return ret;
	return ret == len ? 0 : -EIO;
}

/*
 * In percent with two digits, as the files have it; the kernel rounds it back.
 * By hand, and without zeros in front, which the kernel would have to read: the
 * guest waits, and printf takes as long as the rest of this.
 */
static int vcpufreq_write(struct file *file, u32 util)
{
	u32 hundredths = DIV_ROUND_CLOSEST(util * 10000, 1024);
	u32 percent = hundredths / 100, rest = hundredths % 100;
	char text[sizeof("100.00") - 1];
	char *end = text + sizeof(text), *at = end;

	/* The kernel has a word for all of it, which it reads in no time. */
	if (util == 1024)
		return vcpufreq_write_text(file, "max", 3);
	*--at = '0' + rest % 10;
	*--at = '0' + rest / 10;
	*--at = '.';
	*--at = '0' + percent % 10;
	if (percent >= 10)
		*--at = '0' + percent / 10;
	return vcpufreq_write_text(file, at, end - at);
}

/* What was written is in force, also when the other half is refused. */
static int vcpufreq_write_min(struct vcpufreq_domain *domain, u32 min)
{
	int ret = vcpufreq_write(domain->min, min);

	if (!ret)
		WRITE_ONCE(domain->force,
			   VCPUFREQ_CLAMP(min, VCPUFREQ_CLAMP_MAX(domain->force)));
	return ret;
}

static int vcpufreq_write_max(struct vcpufreq_domain *domain, u32 max)
{
	int ret = vcpufreq_write(domain->max, max);

	if (!ret)
		WRITE_ONCE(domain->force,
			   VCPUFREQ_CLAMP(VCPUFREQ_CLAMP_MIN(domain->force), max));
	return ret;
}

#ifdef CONFIG_UCLAMP_TASK
/*
 * Whether the current thread shows what its domain's clamp is: one of the group.
 * The scheduler keeps @active and the effective value of a running thread up to
 * date, also when another process writes the group's files.
 */
static bool vcpufreq_shows(const struct vcpufreq_domain *domain)
{
	const void *group;

	if (!current->uclamp[UCLAMP_MIN].active || !current->uclamp[UCLAMP_MAX].active)
		return false;
	rcu_read_lock();
	group = task_css(current, cpu_cgrp_id);
	rcu_read_unlock();
	return group == domain->group;
}

static u32 vcpufreq_effective(void)
{
	return VCPUFREQ_CLAMP(current->uclamp[UCLAMP_MIN].value,
			      current->uclamp[UCLAMP_MAX].value);
}

/* Whether the current thread has the clamp that one of the group had after the last write. */
static bool vcpufreq_is_kept(const struct vcpufreq_domain *domain)
{
	u32 shown = READ_ONCE(domain->shown), now = vcpufreq_effective();

	if (now == shown)
		return true;
	/* A real-time thread has a floor of its own (sched_util_clamp_min_rt_default). */
	return rt_task(current) && VCPUFREQ_CLAMP_MAX(now) == VCPUFREQ_CLAMP_MAX(shown) &&
	       VCPUFREQ_CLAMP_MIN(now) > VCPUFREQ_CLAMP_MIN(shown);
}
#else
static bool vcpufreq_shows(const struct vcpufreq_domain *domain)
{
	return false;
}

static u32 vcpufreq_effective(void)
{
	return VCPUFREQ_CLAMP_NONE;
}

static bool vcpufreq_is_kept(const struct vcpufreq_domain *domain)
{
	return false;
}
#endif

/**
 * vcpufreq_is_in_force - whether a clamp is known to be in force for a domain
 * @domain: the domain
 * @clamp: the clamp
 *
 * Return: true when the files hold this clamp and the current thread, which is
 * one that shows it, has had the same effective clamp since they were written.
 */
bool vcpufreq_is_in_force(const struct vcpufreq_domain *domain, u32 clamp)
{
	return READ_ONCE(domain->force) == clamp && vcpufreq_is_kept(domain) &&
	       vcpufreq_shows(domain);
}

/*
 * A floor above the ceiling counts for nothing: the one that makes room is
 * first. Where another process has written the files, nothing is known of them,
 * and the ceiling is: it is not below the new floor.
 */
static int vcpufreq_write_clamp(struct vcpufreq_domain *domain, u32 clamp)
{
	u32 min = VCPUFREQ_CLAMP_MIN(clamp), max = VCPUFREQ_CLAMP_MAX(clamp);
	u32 old_min = VCPUFREQ_CLAMP_MIN(domain->force);
	u32 old_max = VCPUFREQ_CLAMP_MAX(domain->force);
	int ret = 0;

	/* Mostly the thread has it, which is cheaper to see than whose group it is in. */
	if (!vcpufreq_is_kept(domain) && vcpufreq_shows(domain)) {
		ret = vcpufreq_write_max(domain, max);
		return ret ?: vcpufreq_write_min(domain, min);
	}
	if (max > old_max)
		ret = vcpufreq_write_max(domain, max);
	if (!ret && min != old_min)
		ret = vcpufreq_write_min(domain, min);
	if (!ret && max < old_max)
		ret = vcpufreq_write_max(domain, max);
	return ret;
}

/*
 * What a thread of the group has afterwards is what the groups above allow of it.
 * Where no such thread writes, that is not known, and the next one writes again
 * if it has less.
 */
static int vcpufreq_clamp_group(struct vcpufreq_domain *domain, u32 clamp)
{
	int ret = vcpufreq_write_clamp(domain, clamp);

	WRITE_ONCE(domain->shown,
		   vcpufreq_shows(domain) ? vcpufreq_effective() : domain->force);
	return ret;
}

/**
 * vcpufreq_clamp - put into force what a domain wants by now
 * @domain: the domain
 * @since_ns: when that was asked for, of ktime_get_mono_fast_ns(); 0: it is not
 *	counted
 *
 * Return: 0, or the error of the scheduler.
 */
int vcpufreq_clamp(struct vcpufreq_domain *domain, u64 since_ns)
{
	struct vcpufreq_host_stats *stats = &domain->stats;
	u32 clamp;
	u64 took;
	int ret;

	mutex_lock(&domain->lock);
	clamp = READ_ONCE(domain->wanted);
	ret = vcpufreq_clamp_group(domain, clamp);
	if (!since_ns) {
		/* What the VMM does by itself. */
	} else if (ret) {
		stats->refused++;
		stats->last_error = ret;
	} else {
		took = max_t(s64, ktime_get_mono_fast_ns() - since_ns, 0);
		stats->applied++;
		stats->after_ns[min(ilog2(took | 1), VCPUFREQ_HOST_BUCKETS - 1)]++;
	}
	mutex_unlock(&domain->lock);
	return ret;
}
