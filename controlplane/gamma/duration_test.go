package gamma

import (
	"regexp"
	"testing"
	"time"
)

func TestDuration(t *testing.T) {
	for _, tt := range []struct {
		in, out string
		d       time.Duration
	}{
		{"0s", "0s", 0},
		{"0h0m0s0ms", "0s", 0},
		{"10s", "10s", 10 * time.Second},
		{"90m", "1h30m", 90 * time.Minute},
		{"1h30m10s5ms", "1h30m10s5ms", time.Hour + 30*time.Minute + 10*time.Second + 5*time.Millisecond},
		{"5ms1h", "1h5ms", time.Hour + 5*time.Millisecond}, // GEP-2257 asks for no order
		{"99999h", "99999h", MaxDuration},
		{"00001s", "1s", time.Second},
	} {
		d, why := parseDuration(tt.in)
		if why != "" || d != tt.d || FormatDuration(d) != tt.out {
			t.Errorf("%s: %v %q, written %s; want %v, %s", tt.in, d, why, FormatDuration(d), tt.d, tt.out)
		}
	}
	for _, bad := range []string{"", "10", "s", "1.5s", "-1s", "+1s", " 1s", "1s ", "1 s", "1S", "1us", "1d", "100000s", "1h1h1h1h1h", "99999h1ms", "1m2", "١s", "1mss"} {
		if d, why := parseDuration(bad); why == "" || d != 0 {
			t.Errorf("%q: %v", bad, d)
		}
	}
}

// FuzzDuration: the Gateway API's own pattern and Go's parser are the oracle.
func FuzzDuration(f *testing.F) {
	form := regexp.MustCompile(`^([0-9]{1,5}(h|m|s|ms)){1,4}$`)
	for _, s := range []string{"", "1h30m", "5ms", "99999h1s", "1.5h", "1h1h1h1h", "007s"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, why := parseDuration(s)
		want, err := time.ParseDuration(s)
		ok := form.MatchString(s) && err == nil && want <= MaxDuration
		if ok != (why == "") || ok && d != want {
			t.Fatalf("%q: %v %q, Go says %v %v", s, d, why, want, err)
		}
		if again, why := parseDuration(FormatDuration(d)); why != "" || again != d {
			t.Fatalf("%v is written %s, which reads %v %q", d, FormatDuration(d), again, why)
		}
	})
}
