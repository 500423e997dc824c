// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device tree crate, through its public interface.

#[cfg(test)]
mod blob;
#[cfg(test)]
mod boards;
#[cfg(test)]
mod capacity;
#[cfg(test)]
mod debian_trees;
#[cfg(test)]
mod dtc;
#[cfg(test)]
mod facts;
#[cfg(test)]
mod maps;
#[cfg(test)]
mod merge;
#[cfg(test)]
mod nodes;
#[cfg(test)]
mod ordered;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod shapes;
#[cfg(test)]
mod tools;
