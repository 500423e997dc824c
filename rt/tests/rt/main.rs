// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The promises of host tuning, on directory trees that stand for hosts.

#[cfg(test)]
mod cmdline;
#[cfg(test)]
mod coupled;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod findings;
#[cfg(test)]
mod governors;
#[cfg(test)]
mod guests;
#[cfg(test)]
mod impostors;
#[cfg(test)]
mod partition;
#[cfg(test)]
mod planted;
#[cfg(test)]
mod profiles;
#[cfg(test)]
mod ready;
#[cfg(test)]
mod settings;
