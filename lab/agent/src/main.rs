//! Lab agent.
fn main() {}
