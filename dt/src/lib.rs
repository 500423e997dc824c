//! vcpufreq-dt.
