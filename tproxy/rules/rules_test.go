package rules

import (
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The golden files were written by hand from contract 3.5; package apply compares
// them with what nft itself prints.
func TestRulesetGolden(t *testing.T) {
	for name, c := range map[string]Config{
		"redirect-all": {RedirectAll: true},
		"scoped":       {},
		"exclusions": {RedirectAll: true, ExcludePorts: []uint16{443, 5432}, ExcludeRanges: []netip.Prefix{
			netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("192.0.2.7/32"),
			netip.MustParsePrefix("2001:db8::/33"), netip.MustParsePrefix("2001:db8::7/128"), netip.MustParsePrefix("2001:db8:1::/48"),
		}},
	} {
		t.Run(name, func(t *testing.T) {
			want, err := os.ReadFile(filepath.Join("testdata", name+".nft"))
			if err != nil {
				t.Fatal(err)
			}
			if got := c.Ruleset().String(); got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestMarksAreDisjoint(t *testing.T) {
	if MarkBypass&MarkDivert == MarkBypass || MarkBypass&MarkDivert == MarkDivert {
		t.Error("one mark is a bit mask of the other")
	}
	for _, theirs := range []int{0x4000, 0x8000, 1337} { // kube-proxy and Istio
		if MarkBypass == theirs || MarkDivert == theirs {
			t.Errorf("mark %#x is somebody else's", theirs)
		}
	}
}

// Whatever a pod asks for, the rules that keep it alive come before all others.
func TestVitalRulesComeFirst(t *testing.T) {
	c := Config{RedirectAll: true, ExcludePorts: []uint16{1, 2}, ExcludeRanges: []netip.Prefix{{}, netip.MustParsePrefix("::/0")}}
	out := c.Ruleset().Chains[0].Rules
	for i, want := range []string{"meta mark 0x0000ae7e accept", "ct direction reply accept", "ip daddr 127.0.0.0/8 accept"} {
		if got := out[i].String(); got != want {
			t.Errorf("rule %d is %q, want %q", i, got, want)
		}
	}
	text := c.Ruleset().String()
	if strings.Contains(text, "invalid") {
		t.Errorf("an invalid prefix became a rule:\n%s", text)
	}
	if !strings.Contains(text, "\t\tmeta nfproto ipv6 accept\n") {
		t.Errorf("::/0 did not become a rule that matches all IPv6:\n%s", text)
	}
}

func TestIPv4Only(t *testing.T) {
	full := Config{RedirectAll: true, ExcludeRanges: []netip.Prefix{netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("10.0.0.0/8")}}.Ruleset()
	before := full.String()
	var want []string
	for line := range strings.Lines(before) {
		if !strings.Contains(line, "ip6") {
			want = append(want, line)
		}
	}
	if got := full.IPv4Only().String(); got != strings.Join(want, "") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, ""))
	}
	if full.String() != before {
		t.Error("IPv4Only changed its receiver")
	}
}

func TestParseAnnotations(t *testing.T) {
	const R, P, N = AnnotationRedirectAll, AnnotationExcludePorts, AnnotationExcludeRanges
	for _, tt := range []struct {
		name     string
		in       map[string]string
		def      bool
		want     string // redirect-all, ports, ranges
		problems []string
	}{
		{"nothing", nil, true, "true [] []", nil},
		{"nothing, scoped node", nil, false, "false [] []", nil},
		{"true", map[string]string{R: "true"}, false, "true [] []", nil},
		{"false", map[string]string{R: "false"}, true, "false [] []", nil},
		{"not a bool", map[string]string{R: "yes"}, true, "true [] []", []string{R + `: "yes": write "true" or "false"; the node's default holds`}},
		{"empty", map[string]string{R: ""}, false, "false [] []", []string{R + `: "": write "true" or "false"; the node's default holds`}},
		{"ports", map[string]string{P: "443, 80,443,,\t5432 "}, false, "false [80 443 5432] []", nil},
		{"bad ports", map[string]string{P: "0,65536,-1,x,9000-9010,65535"}, false, "false [65535] []", []string{
			P + `: "0": not a port`, P + `: "65536": not a port`, P + `: "-1": not a port`, P + `: "x": not a port`, P + `: "9000-9010": not a port`}},
		{"ranges", map[string]string{N: "10.1.2.3/8,192.0.2.7 , fd00::1/8,2001:db8::1,10.0.0.0/8"}, false,
			"false [] [10.0.0.0/8 192.0.2.7/32 2001:db8::1/128 fd00::/8]", nil},
		{"mapped is IPv4", map[string]string{N: "::ffff:10.0.0.0/104,::ffff:192.0.2.1"}, false, "false [] [10.0.0.0/8 192.0.2.1/32]", nil},
		{"bad ranges", map[string]string{N: "10.0.0.0/33,10.0.0,example.org,fe80::1%eth0,::ffff:0.0.0.0/90,0.0.0.0/0"}, false, "false [] [0.0.0.0/0]", []string{
			N + `: "10.0.0.0/33": not an address range`, N + `: "10.0.0": not an address range`, N + `: "example.org": not an address range`,
			N + `: "fe80::1%eth0": an address with a zone`, N + `: "::ffff:0.0.0.0/90": an IPv4-mapped range shorter than /96`}},
		{"other annotations", map[string]string{"capture.aether.io/else": "x"}, false, "false [] []", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, ps := ParseAnnotations(tt.in, tt.def)
			if got := text(c); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if len(ps) != len(tt.problems) {
				t.Fatalf("problems %v, want %v", ps, tt.problems)
			}
			for i, p := range ps {
				if !strings.HasPrefix(p.String(), tt.problems[i]) {
					t.Errorf("problem %q, want %q", p, tt.problems[i])
				}
			}
		})
	}
}

func text(c Config) string {
	return strings.Join([]string{strconv.FormatBool(c.RedirectAll), list10(c.ExcludePorts), listP(c.ExcludeRanges)}, " ")
}

func list10(ps []uint16) string {
	var s []string
	for _, p := range ps {
		s = append(s, strconv.Itoa(int(p)))
	}
	return "[" + strings.Join(s, " ") + "]"
}

func listP(ps []netip.Prefix) string {
	var s []string
	for _, p := range ps {
		s = append(s, p.String())
	}
	return "[" + strings.Join(s, " ") + "]"
}

func TestParseAnnotationsIsBounded(t *testing.T) {
	var many, bad []string
	for p := 1; p <= 3000; p++ {
		many = append(many, strconv.Itoa(p))
		bad = append(bad, strings.Repeat("é", p))
	}
	c, ps := ParseAnnotations(map[string]string{AnnotationExcludePorts: strings.Join(many, ",")}, true)
	if len(c.ExcludePorts) != MaxExclusions || c.ExcludePorts[MaxExclusions-1] != MaxExclusions {
		t.Errorf("%d ports excluded, want the first %d", len(c.ExcludePorts), MaxExclusions)
	}
	if len(ps) != 1 || ps[0].Entry != strconv.Itoa(MaxExclusions+1) {
		t.Errorf("problems %v, want one, about the first entry left out", ps)
	}
	_, ps = ParseAnnotations(map[string]string{AnnotationExcludeRanges: strings.Join(bad, ",")}, true)
	if len(ps) != maxProblems+1 {
		t.Errorf("%d problems of one annotation, want at most %d", len(ps), maxProblems+1)
	}
	for _, p := range ps {
		if len(p.String()) > 300 {
			t.Errorf("a problem of %d bytes: %.40q...", len(p.String()), p)
		}
	}
	_, ps = ParseAnnotations(map[string]string{AnnotationExcludeRanges: strings.Repeat("é", 3000)}, true)
	if want := strings.Repeat("é", 32) + "..."; len(ps) != 1 || ps[0].Entry != want {
		t.Errorf("problems %.300v, want one of %s", ps, want)
	}
}

// A configuration written back as annotations reads as itself, and every rule
// it gives prints as one line.
func FuzzParseAnnotations(f *testing.F) {
	f.Add("true", "80,443", "10.0.0.0/8,fd00::/8", true)
	f.Add("", " 1,,x,65536", "::ffff:1.2.3.4,0.0.0.0/0,fe80::1%1", false)
	f.Fuzz(func(t *testing.T, redirect, ports, ranges string, def bool) {
		in := map[string]string{AnnotationRedirectAll: redirect, AnnotationExcludePorts: ports, AnnotationExcludeRanges: ranges}
		before := maps.Clone(in)
		c, _ := ParseAnnotations(in, def)
		if !maps.Equal(in, before) {
			t.Fatal("the annotations were changed")
		}
		if redirect != "true" && redirect != "false" && c.RedirectAll != def {
			t.Fatalf("redirect-all %q overrides the default", redirect)
		}
		back, ps := ParseAnnotations(map[string]string{
			AnnotationRedirectAll:   strconv.FormatBool(c.RedirectAll),
			AnnotationExcludePorts:  strings.ReplaceAll(strings.Trim(list10(c.ExcludePorts), "[]"), " ", ","),
			AnnotationExcludeRanges: strings.ReplaceAll(strings.Trim(listP(c.ExcludeRanges), "[]"), " ", ","),
		}, !def)
		if len(ps) != 0 || text(back) != text(c) {
			t.Fatalf("read back as %s with problems %v, was %s", text(back), ps, text(c))
		}
		if !slices.IsSorted(c.ExcludePorts) {
			t.Fatalf("ports out of order: %v", c.ExcludePorts)
		}
		base := len(Config{RedirectAll: c.RedirectAll}.Ruleset().Chains[0].Rules)
		rs := c.Ruleset()
		if got, want := len(rs.Chains[0].Rules), base+2*len(c.ExcludePorts)+len(c.ExcludeRanges); got != want {
			t.Fatalf("%d rules, want %d", got, want)
		}
		if got, want := strings.Count(rs.String(), "\n"), len(rs.Chains[0].Rules)+len(rs.Chains[1].Rules)+9; got != want {
			t.Fatalf("%d lines, want %d:\n%s", got, want, rs)
		}
	})
}
