// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's trace: an instance of one's own, and its lines as events. The bench and the scenarios
//! of the lab read it.

pub mod event;
pub mod instance;
pub mod line;

pub use event::{FrequencyEvent, Mmio, Switch};
pub use instance::{INSTANCES, Instance, lost};
pub use line::{TraceLine, events};
