// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! In each order of the steps of the threads, what `src/lib.rs` promises holds.

#[test]
fn the_last_of_two_writers_is_in_force() {
    vcpufreq_orders::the_last_of_two_writers_is_in_force();
}

#[test]
fn a_request_in_the_last_round_is_in_force() {
    vcpufreq_orders::a_request_in_the_last_round_is_in_force();
}

#[test]
fn the_last_of_three_writers_is_in_force() {
    vcpufreq_orders::the_last_of_three_writers_is_in_force();
}

#[test]
fn a_request_that_waits_is_not_forgotten() {
    vcpufreq_orders::a_request_that_waits_is_not_forgotten();
}

#[test]
fn a_token_is_given_once() {
    vcpufreq_orders::a_token_is_given_once();
}

#[test]
fn a_bucket_loses_no_charge() {
    vcpufreq_orders::a_bucket_loses_no_charge();
}

#[test]
fn a_page_has_the_frequency_of_the_latest_look() {
    vcpufreq_orders::a_page_has_the_frequency_of_the_latest_look();
}

#[test]
fn no_ceiling_is_left() {
    vcpufreq_orders::no_ceiling_is_left();
}

#[test]
fn a_write_left_unfinished_is_carried_out() {
    vcpufreq_orders::a_write_left_unfinished_is_carried_out();
}

#[test]
fn an_interval_is_closed_once() {
    vcpufreq_orders::an_interval_is_closed_once();
}
