//! vcpufreq-device.
