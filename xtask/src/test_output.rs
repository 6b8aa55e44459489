//! Parses the output of `cargo test` and nextest: how many tests passed, and how long they took.

/// A test, or a test binary, and its time.
#[derive(Clone, PartialEq, Debug)]
pub struct TestTime {
    /// Its crate and the test, or the file with which the binary begins.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// Tests that passed, from the summaries of nextest (`12 tests run: 12 passed`) and libtest (`test result: ok. 3
/// passed`).
pub fn passed(output: &str) -> u64 {
    let summaries = output.lines().filter(|line| line.contains("tests run:") || line.contains("test result:"));
    let count = |line: &str| -> Option<u64> {
        let before = line.split_once(" passed")?.0;
        before.rsplit(' ').next()?.parse().ok()
    };
    summaries.filter_map(count).sum()
}

/// The time of each test that nextest ran, or of each test binary that `cargo test` ran, the slowest first.
pub fn times(output: &str) -> Vec<TestTime> {
    let (mut crate_name, mut running) = (String::new(), None);
    let mut times = Vec::new();
    for line in output.lines() {
        if let Some((source, binary)) = started(line) {
            // Cargo prints the name of a file within its package, but not the package. Its unit tests, which run first,
            // have the package's name.
            if source == "src/lib.rs" || source == "src/main.rs" {
                crate_name = binary.to_owned();
            }
            running = Some(format!("{crate_name} {source}"));
        } else if let Some(seconds) = finished(line) {
            times.extend(running.take().map(|name| TestTime { name, seconds }));
        } else {
            times.extend(passed_alone(line));
        }
    }
    times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    times
}

/// Nextest's line of a test: `PASS [   0.042s] ( 4/27) crate::binary module::test`.
fn passed_alone(line: &str) -> Option<TestTime> {
    let (seconds, rest) = line.trim_start().strip_prefix("PASS [")?.split_once("s]")?;
    let name =
        rest.trim_start().strip_prefix('(').and_then(|rest| rest.split_once(") ")).map_or(rest, |(_, name)| name);
    Some(TestTime { name: name.trim().to_owned(), seconds: seconds.trim().parse().ok()? })
}

/// The source and the name of the binary that Cargo starts: `Running unittests src/lib.rs
/// (target/debug/deps/name-hash)`.
fn started(line: &str) -> Option<(&str, &str)> {
    let (source, path) = line.trim_start().strip_prefix("Running ")?.strip_suffix(')')?.rsplit_once(" (")?;
    let (name, _hash) = path.rsplit('/').next()?.rsplit_once('-')?;
    Some((source.strip_prefix("unittests ").unwrap_or(source), name))
}

/// The time in libtest's summary: `test result: ok. 3 passed; 0 failed; finished in 0.57s`.
fn finished(line: &str) -> Option<f64> {
    line.strip_prefix("test result:")?.split_once("finished in ")?.1.strip_suffix('s')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_tests_are_summed_over_all_summaries() {
        let nextest = "     Summary [   0.052s] 12 tests run: 12 passed, 0 skipped\n";
        assert_eq!(passed(nextest), 12);
        let libtest =
            "test a ... ok\ntest result: ok. 3 passed; 0 failed; 0 ignored\n\ntest result: ok. 4 passed; 0 failed\n";
        assert_eq!(passed(libtest), 7);
        assert_eq!(passed("nothing here passed\n"), 0);
    }

    #[test]
    fn binaries_are_named_by_crate_and_file_and_the_slowest_is_first() {
        let output = "   Compiling a v0.1.0\n     Running unittests src/lib.rs (target/debug/deps/a_b-09fe)\n\n\
                      running 1 test\ntest c ... ok\n\n\
                      test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.57s\n\n     \
                      Running tests/server/main.rs (/t/deps/server-3ca1)\n\
                      test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 12.30s\n     \
                      Running benches/no_harness.rs (/t/deps/no_harness-3ca1)\n     \
                      Running unittests src/main.rs (/t/deps/c-1)\n\
                      test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        let found: Vec<_> = times(output).into_iter().map(|time| (time.name, time.seconds)).collect();
        let expected = [("a_b tests/server/main.rs", 12.3), ("a_b src/lib.rs", 0.57), ("c src/main.rs", 0.0)];
        assert_eq!(found, expected.map(|(name, seconds)| (name.to_owned(), seconds)));
        assert_eq!(times("     Summary [   0.052s] 12 tests run: 12 passed, 0 skipped\n"), []);
    }

    #[test]
    fn nextest_names_each_test_with_its_time() {
        let output = "        PASS [   0.042s] (1/2) a::lent lent::a_test\n        PASS [  12.500s] a tests::slow\n        FAIL [   1.000s] a b\n";
        let found: Vec<_> = times(output).into_iter().map(|time| (time.name, time.seconds)).collect();
        assert_eq!(found, [("a tests::slow".to_owned(), 12.5), ("a::lent lent::a_test".to_owned(), 0.042)]);
    }
}
