package target

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestResolve: every address once, names that are not known beside those that are, and an
// order that is not always the same.
func TestResolve(t *testing.T) {
	dns := func(_ context.Context, host string) ([]string, error) {
		switch host {
		case "two":
			return []string{"10.0.0.1", "fd00::1"}, nil
		case "empty":
			return nil, nil
		case "many":
			var out []string
			for i := range 3 * maxAddrs {
				out = append(out, fmt.Sprintf("10.1.%d.%d", i>>8, i&255))
			}
			return out, nil
		}
		return nil, errors.New("no such host")
	}
	for _, tt := range []struct {
		targets []string
		want    string // ascending
		err     string // what stands in it
	}{
		{[]string{"two:8443"}, "10.0.0.1:8443 [fd00::1]:8443", ""},
		{[]string{"10.0.0.1:8443", "two:8443", "[fd00::2]:1"}, "10.0.0.1:8443 [fd00::1]:8443 [fd00::2]:1", ""},
		{[]string{"gone:8443", "two:1"}, "10.0.0.1:1 [fd00::1]:1", ""},
		{[]string{"gone:8443", "empty:8443"}, "", "registrar gone:8443: no such host"},
		{[]string{"empty:8443"}, "", "registrar empty:8443: the name has no address"},
		{[]string{"two"}, "", "write <host>:<port>"},
		{[]string{"two:0"}, "", "write <host>:<port>"},
		{[]string{":8443"}, "", "write <host>:<port>"},
	} {
		t.Run(strings.Join(tt.targets, " "), func(t *testing.T) {
			got, err := Resolve(t.Context(), tt.targets, dns)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("%v, %v, want an error with %q", got, err, tt.err)
				}
				return
			}
			slices.Sort(got)
			if err != nil || strings.Join(got, " ") != tt.want {
				t.Errorf("%v, %v, want %s", got, err, tt.want)
			}
		})
	}
	first := map[string]bool{}
	for range 100 {
		got, err := Resolve(t.Context(), []string{"many:8443"}, dns)
		if err != nil || len(got) != maxAddrs {
			t.Fatalf("%d addresses, %v, want %d", len(got), err, maxAddrs)
		}
		first[got[0]] = true
	}
	if len(first) < 10 {
		t.Errorf("of 100 times, %d addresses came first: all nodes would meet at them", len(first))
	}
}
