// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The promises of host tuning, on directory trees that stand for hosts.

#![cfg(test)]

mod cmdline;
mod coupled;
mod crash;
mod exec;
mod fake;
mod findings;
mod four;
mod governors;
mod guests;
mod impostors;
mod partition;
mod planted;
mod profiles;
mod ready;
mod settings;
