// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests of vcpufreq_steal.c, beside those of vcpufreq_scale.c. They change no CPU's
 * capacity.
 */
#include <kunit/test.h>

/* Under test, with its static functions. */
#include "../vcpufreq_steal.c"

#define MS	((u64)NSEC_PER_MSEC)
#define MOST	(SCHED_CAPACITY_SCALE - VCPUFREQ_STEAL_MIN)

/* A look after @elapsed ms, in which the host took @taken, and tasks ran for @ran. */
static unsigned int look(struct vcpufreq_steal *steal, u64 elapsed, u64 taken, u64 ran)
{
	return vcpufreq_steal_share(steal, steal->stolen + taken * MS, steal->busy + ran * MS,
				    steal->looked_at + elapsed * MS);
}

static void a_share_rises_at_once(struct kunit *test)
{
	struct vcpufreq_steal steal = {};

	KUNIT_EXPECT_EQ(test, look(&steal, 250, 0, 250), 0);
	KUNIT_EXPECT_EQ(test, look(&steal, 250, 125, 125), 512);
	KUNIT_EXPECT_EQ(test, look(&steal, 400, 300, 100), 768);
}

static void it_falls_at_once_where_tasks_run(struct kunit *test)
{
	struct vcpufreq_steal steal = {};

	look(&steal, 250, 125, 125);
	KUNIT_EXPECT_EQ(test, look(&steal, 250, 0, 250), 0);

	look(&steal, 250, 125, 125);
	KUNIT_EXPECT_EQ(test, look(&steal, 250, 50, 200), 204);
}

static void it_falls_in_seconds_where_none_does(struct kunit *test)
{
	struct vcpufreq_steal steal = {};

	look(&steal, 250, 125, 125);
	KUNIT_EXPECT_EQ(test, look(&steal, 1000, 0, 0), 256);
	KUNIT_EXPECT_EQ(test, look(&steal, 500, 0, 0), 128);
	KUNIT_EXPECT_EQ(test, look(&steal, 10000, 0, 0), 0);
}

static void little_is_nothing(struct kunit *test)
{
	struct vcpufreq_steal steal = {};

	KUNIT_EXPECT_EQ(test, look(&steal, 256, 7, 249), 0);
	KUNIT_EXPECT_EQ(test, look(&steal, 256, 8, 248), VCPUFREQ_STEAL_MIN);
}

/* The times are the host's, and accounted late. */
static void any_times_are_bounded(struct kunit *test)
{
	static const u64 any[] = { 0, 1, MS, 1ULL << 63, U64_MAX - 1, U64_MAX };
	struct vcpufreq_steal steal = {};
	unsigned int i, j, k;

	for (i = 0; i < ARRAY_SIZE(any); i++)
		for (j = 0; j < ARRAY_SIZE(any); j++)
			for (k = 0; k < ARRAY_SIZE(any); k++)
				KUNIT_EXPECT_LE(test, vcpufreq_steal_share(&steal, any[i], any[j],
									   any[k]), MOST);

	steal = (struct vcpufreq_steal) {};
	KUNIT_EXPECT_EQ(test, look(&steal, 250, 10000, 10000), MOST);
}

static struct kunit_case steal_cases[] = {
	KUNIT_CASE(a_share_rises_at_once),
	KUNIT_CASE(it_falls_at_once_where_tasks_run),
	KUNIT_CASE(it_falls_in_seconds_where_none_does),
	KUNIT_CASE(little_is_nothing),
	KUNIT_CASE(any_times_are_bounded),
	{}
};

static struct kunit_suite steal_suite = {
	.name = "vcpufreq_steal",
	.test_cases = steal_cases,
};

kunit_test_suite(steal_suite);
