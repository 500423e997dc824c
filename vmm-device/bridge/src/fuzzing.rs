// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest or the kernel fills, for `fuzz/`: a VMM has no use for it.

pub use super::ioeventfd::FakeTrace;
pub use super::shm::ShmRequests;
