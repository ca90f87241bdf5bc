package httpmsg

import (
	"bytes"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

func TestAuthorityIPv6(t *testing.T) {
	for _, s := range []string{"::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::8", "::ffff:1.2.3.4",
		"1:2:3:4:5:6:1.2.3.4", "1::1.2.3.4", "ABCD:ef01::", // good ones, then bad ones
		"", ":", ":::", "1", "1:", ":1", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::", "g::", "::1.2.3", "::1.2.3.256", "::01.2.3.4",
		"::1.2.3.4.5", "1:2:3:4:5:6:7:1.2.3.4", "1.2.3.4", "1:2:3:4:5:6:7:8:", "::1.2.3.4:5", "1::2:3:4:5:6:7:8", "::%1", "::1..2.3", "1:2:3:4:5:6::1.2.3.4"} {
		checkIPv6(t, s)
	}
}

func FuzzIPv6(f *testing.F) {
	f.Add("1:2::ffff:1.2.3.4")
	f.Fuzz(func(t *testing.T, s string) { checkIPv6(t, s) })
}

func checkIPv6(t *testing.T, s string) {
	t.Helper()
	a, err := netip.ParseAddr(s)
	if want := err == nil && a.Is6() && a.Zone() == ""; isIPv6([]byte(s)) != want {
		t.Errorf("isIPv6(%q) is %v, net/netip says %v", s, !want, want)
	}
}

// TestAuthorityPort: a port is a number of 1 to 65535, written the one way.
func TestAuthorityPort(t *testing.T) {
	for _, host := range []string{"cart", "10.0.0.1", "[::1]", "a_b.c~d"} {
		for port, want := range map[string]bool{
			":1": true, ":80": true, ":8080": true, ":65535": true,
			":0": false, ":00": false, ":08080": false, ":00080": false, ":01": false, ":65536": false, ":99999": false, ":100000": false,
			":http": false, ":80a": false, ":-1": false, ":+1": false, ": 1": false, ":8080:8080": false, "::": false, ":1:": false,
		} {
			v := host + port
			if a, is, ok := Authority([]byte(v)); ok != want || ok && (!is || string(a) != v) {
				t.Errorf("%s: %q, port %v, %v", v, a, is, ok)
			}
		}
		for _, v := range []string{host, host + ":"} {
			if a, is, ok := Authority([]byte(v)); !ok || is || string(a) != host {
				t.Errorf("%s: %q, port %v, %v", v, a, is, ok)
			}
		}
	}
	for _, v := range []string{":80", ":", "u@cart", "cart@", "a/b", "a b", "[::1", "::1", "a%41", "a\\b", "[::1]x", "a?b", "a#b", "\xc3\xa4"} {
		if _, _, ok := Authority([]byte(v)); ok {
			t.Errorf("%q is taken", v)
		}
	}
	if n := testing.AllocsPerRun(100, func() { Authority([]byte("cart.shop.aether.internal:8080")) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzAuthority holds it against the grammar, spelled as an expression.
func FuzzAuthority(f *testing.F) {
	for _, s := range []string{"", "cart", "cart:8080", "cart:0", "cart:080", "[::1]:1", "a:b", "a@b", "a:", ":"} {
		f.Add([]byte(s))
	}
	grammar := regexp.MustCompile(`^(?:([0-9A-Za-z._~!$&'()*+,;=-]+)|\[([0-9A-Fa-f:.]+)\])?(:[0-9]*)?$`)
	f.Fuzz(func(t *testing.T, b []byte) {
		a, port, ok := Authority(b)
		m := grammar.FindSubmatch(b)
		want := m != nil && (len(m[1]) > 0 || len(m[2]) > 0 || len(m[3]) == 0)
		if want && len(m[2]) > 0 {
			ip, err := netip.ParseAddr(string(m[2]))
			want = err == nil && ip.Is6()
		}
		digits := ""
		if want {
			digits = strings.TrimPrefix(string(m[3]), ":")
			if n, err := strconv.Atoi(digits); digits != "" && (err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != digits) {
				want = false
			}
		}
		if ok != want || ok && (port != (digits != "") || !bytes.Equal(a, bytes.TrimSuffix(b, []byte(":")))) {
			t.Fatalf("%q: %q, port %v, %v, want %v", b, a, port, ok, want)
		}
	})
}
