// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of clamp.c, on files that note what is written: a module of its own,
 * where the kernel has KUnit.
 */
#include <kunit/test.h>
#include <linux/module.h>

/* Under test, with its static functions. */
#include "../clamp.c"

/* A group's two files. What they hold is as the kernel reads them. */
struct files {
	struct kunit *test;
	struct vcpufreq_domain domain;
	struct file min, max;
	u32 held[2];
	unsigned int writes;
	unsigned int refuse_from;	/* the write from which on all are refused */
};

/* As cpu_uclamp_write() of kernel/sched/core.c does: percent with two digits, or "max". */
static u32 read_back(struct kunit *test, const char *text)
{
	unsigned int percent, hundredths;
	int numbers;

	if (!strcmp(text, "max"))
		return 1024;
	numbers = sscanf(text, "%u.%2u", &percent, &hundredths);
	KUNIT_ASSERT_EQ_MSG(test, numbers, 2, "%s", text);
	/* Two digits behind the point, and none too many before it. */
	KUNIT_ASSERT_EQ_MSG(test, strlen(text), percent < 10 ? 4 : 5, "%s", text);
	return DIV_ROUND_CLOSEST((percent * 100 + hundredths) << SCHED_CAPACITY_SHIFT, 10000);
}

static ssize_t note(struct kiocb *iocb, struct iov_iter *from)
{
	struct files *files = iocb->ki_filp->private_data;
	size_t len = iov_iter_count(from);
	char text[8] = {};

	KUNIT_ASSERT_LT(files->test, len, sizeof(text));
	KUNIT_ASSERT_EQ(files->test, copy_from_iter(text, len, from), len);
	if (files->writes++ >= files->refuse_from)
		return -ENODEV;
	files->held[iocb->ki_filp == &files->max] = read_back(files->test, text);
	/* A floor above the ceiling would count for nothing. */
	KUNIT_EXPECT_LE(files->test, files->held[0], files->held[1]);
	return len;
}

static const struct file_operations notes = { .write_iter = note };

static struct files *files_of(struct kunit *test)
{
	struct files *files = kunit_kzalloc(test, sizeof(*files), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, files);
	files->test = test;
	files->refuse_from = UINT_MAX;
	files->held[1] = 1024;
	files->min.f_op = &notes;
	files->max.f_op = &notes;
	files->min.private_data = files;
	files->max.private_data = files;
	files->domain.min = &files->min;
	files->domain.max = &files->max;
	files->domain.force = VCPUFREQ_CLAMP_NONE;
	files->domain.shown = VCPUFREQ_CLAMP_NONE;
	mutex_init(&files->domain.lock);
	return files;
}

static int clamp_to(struct files *files, u32 min, u32 max)
{
	files->domain.wanted = VCPUFREQ_CLAMP(min, max);
	return vcpufreq_clamp(&files->domain, ktime_get_mono_fast_ns());
}

static void each_utilization_is_read_back(struct kunit *test)
{
	struct files *files = files_of(test);
	u32 util;

	for (util = 0; util <= 1024; util++) {
		KUNIT_ASSERT_EQ(test, vcpufreq_write(&files->max, util), 0);
		KUNIT_EXPECT_EQ(test, files->held[1], util);
	}
}

/* To each clamp of a grid. */
static void clamp_from(struct kunit *test, struct files *files, u32 from_min, u32 from_max)
{
	u32 min, max;

	for (min = 0; min <= 1024; min += 128) {
		for (max = min; max <= 1024; max += 128) {
			KUNIT_ASSERT_EQ(test, clamp_to(files, from_min, from_max), 0);
			KUNIT_ASSERT_EQ(test, clamp_to(files, min, max), 0);
			KUNIT_EXPECT_EQ(test, files->held[0], min);
			KUNIT_EXPECT_EQ(test, files->held[1], max);
		}
	}
}

static void floor_and_ceiling_never_cross(struct kunit *test)
{
	struct files *files = files_of(test);
	u32 min, max;

	for (min = 0; min <= 1024; min += 128)
		for (max = min; max <= 1024; max += 128)
			clamp_from(test, files, min, max);
}

static void what_is_in_force_is_not_written(struct kunit *test)
{
	struct files *files = files_of(test);

	KUNIT_EXPECT_EQ(test, clamp_to(files, 100, 200), 0);
	KUNIT_EXPECT_EQ(test, files->writes, 2);
	KUNIT_EXPECT_EQ(test, clamp_to(files, 100, 200), 0);
	KUNIT_EXPECT_EQ(test, files->writes, 2);
	KUNIT_EXPECT_EQ(test, clamp_to(files, 150, 200), 0);
	KUNIT_EXPECT_EQ(test, files->writes, 3);
}

static void a_refused_half_is_known(struct kunit *test)
{
	struct files *files = files_of(test);

	files->refuse_from = 1;
	KUNIT_EXPECT_EQ(test, clamp_to(files, 300, 600), -ENODEV);
	/* The floor is in force, the ceiling as before. */
	KUNIT_EXPECT_EQ(test, files->domain.force, VCPUFREQ_CLAMP(300, 1024));
	KUNIT_EXPECT_EQ(test, files->domain.stats.refused, 1);
	KUNIT_EXPECT_EQ(test, files->domain.stats.last_error, -ENODEV);
	files->refuse_from = UINT_MAX;
	KUNIT_EXPECT_EQ(test, clamp_to(files, 300, 600), 0);
	KUNIT_EXPECT_EQ(test, files->domain.force, VCPUFREQ_CLAMP(300, 600));
	KUNIT_EXPECT_EQ(test, files->domain.stats.applied, 1);
}

static void each_time_has_a_bucket(struct kunit *test)
{
	struct files *files = files_of(test);
	u32 *after = files->domain.stats.after_ns;
	u64 now;

	files->domain.wanted = VCPUFREQ_CLAMP_NONE;
	now = ktime_get_mono_fast_ns();
	/* Before now, and after it: another CPU's clock. */
	KUNIT_EXPECT_EQ(test, vcpufreq_clamp(&files->domain, 1), 0);
	KUNIT_EXPECT_EQ(test, after[min(ilog2(now), VCPUFREQ_HOST_BUCKETS - 1)], 1);
	KUNIT_EXPECT_EQ(test, vcpufreq_clamp(&files->domain, now + NSEC_PER_SEC * 1000ULL), 0);
	KUNIT_EXPECT_EQ(test, after[0], 1);
	/* The VMM's own are not counted. */
	KUNIT_EXPECT_EQ(test, vcpufreq_clamp(&files->domain, 0), 0);
	KUNIT_EXPECT_EQ(test, files->domain.stats.applied, 2);
}

static struct kunit_case cases[] = {
	KUNIT_CASE(each_utilization_is_read_back),
	KUNIT_CASE(floor_and_ceiling_never_cross),
	KUNIT_CASE(what_is_in_force_is_not_written),
	KUNIT_CASE(a_refused_half_is_known),
	KUNIT_CASE(each_time_has_a_bucket),
	{}
};

static struct kunit_suite suite = {
	.name = "vcpufreq_clamp",
	.test_cases = cases,
};

kunit_test_suite(suite);

MODULE_DESCRIPTION("KUnit tests of vcpufreq_host");
MODULE_LICENSE("GPL");
