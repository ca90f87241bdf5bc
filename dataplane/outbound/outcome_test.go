package outbound

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/exchange"
)

// TestOutcomeRules holds the parser and the five rules to contract 5.7, a line of its table
// after the other, and to what is not in it.
func TestOutcomeRules(t *testing.T) {
	idempotent := []string{"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"}
	others := []string{"POST", "PATCH", "CONNECT", "PROPFIND", "get"}
	const none, some, all = "no method", "idempotent methods", "all methods"
	for _, tt := range []struct{ outcome, want string }{
		// The examples.
		{"200;-;%s;via_upstream", none},
		{"503;-;%s;via_upstream", all},
		{"0;UH;%s;no_healthy_upstream", all},
		{"0;-;%s;overload", all},
		// Code 503, flags "-".
		{"503;-;%s;not_ready", all},
		{"503;UC;%s;via_upstream", none},
		{"500;-;%s;via_upstream", none},
		{"502;-;%s;via_upstream", none},
		{"504;-;%s;via_upstream", none},
		{"404;-;%s;via_upstream", none},
		// Code 0, flags "-", details end in overload.
		{"0;-;%s;memory;overload", all},
		{"0;-;%s;overload_", none},
		{"0;-;%s;overload;", none},
		{"0;-;%s;via_upstream", none},
		{"200;-;%s;overload", none},
		// Never reached.
		{"0;UF;%s;upstream_connection_failure", all},
		{"0;UO;%s;overflow", all},
		{"0;NC;%s;cluster_not_found", all},
		{"0;UF,UH,UO,NC;%s;x", all},
		{"503;UF;%s;x", none},
		// Begun.
		{"0;UC;%s;x", some},
		{"0;UR;%s;x", some},
		{"0;LR;%s;x", some},
		{"0;UF,UC;%s;x", some},
		// The application refused it.
		{"0;UR;%s;upstream_reset_before_response_started{REFUSED_STREAM}", all},
		{"0;UR;%s;upstream_reset_before_response_started{remote_refused_stream_reset}", all},
		{"0;UT;%s;REFUSED_STREAM", none},
		{"200;-;%s;REFUSED_STREAM", none},
		// Timeouts, unknown flags, and what is no outcome.
		{"0;UT;%s;response_timeout", none},
		{"0;UF,UT;%s;x", none},
		{"0;UPE;%s;upstream_protocol_error", none},
		{"0;XX;%s;x", none},
		{"0;UF,;%s;x", none},
		{"0;,UF;%s;x", none},
		{"0;;%s;x", none},
		{"0;uf;%s;x", none},
		{"0;UF,-;%s;x", none},
		{"0; UF;%s;x", none},
		{"00;UF;%s;x", none},
		{"+0;UF;%s;x", none},
		{";UF;%s;x", none},
		{"0503;-;%s;x", none},
		{"53;-;%s;x", none},
		{"5o3;-;%s;x", none},
		{"503;-;%s;", none},
		{"503;-;%s", none},
		{"503;-", none},
		{"503", none},
		{"", none},
		{" 503;-;%s;x", none},
		{"503;-;%sX;x", none},
		{"503;-;;x", none},
	} {
		judge := func(methods []string) (yes, no int) {
			for _, m := range methods {
				v := tt.outcome
				if strings.Contains(v, "%s") {
					v = fmt.Sprintf(v, m)
				}
				o, ok := parseOutcome([]byte(v), []byte(m))
				x := &exchange.Exchange{}
				x.Req.Method = []byte(m)
				if ok && o.retriable(x.Idempotent()) {
					yes++
				} else {
					no++
				}
			}
			return yes, no
		}
		y1, n1 := judge(idempotent)
		y2, n2 := judge(others)
		got := "some of each"
		switch {
		case n1+n2 == 0:
			got = all
		case y1+y2 == 0:
			got = none
		case n1 == 0 && y2 == 0:
			got = some
		}
		if got != tt.want {
			t.Errorf("%q is retried for %s, want %s", tt.outcome, got, tt.want)
		}
	}
}

// TestMeant: the record has the status that the destination's proxy means.
func TestMeant(t *testing.T) {
	for v, want := range map[string]int{
		"200;-;POST;via_upstream": 200, "403;-;POST;rbac-denied": 403, "0;UF;POST;upstream_connection_failure": 503,
		"0;UC;POST;x": 503, "0;UT;POST;response_timeout": 504, "0;UPE;POST;upstream_protocol_error": 502,
		"": 0, "200": 0, "0": 0, "00;-;x": 0, "2000;-;x;y": 0, "x00;-;x;y": 0,
	} {
		if got := loggedStatus([]byte(v)); got != want {
			t.Errorf("%q: %d, want %d", v, got, want)
		}
	}
}

// TestOutcomeRulesAtRandom: the rules once more, as regular expressions over the field's text.
func TestOutcomeRulesAtRandom(t *testing.T) {
	const (
		never = `(?:UF|UH|UO|NC)`
		begun = `(?:UF|UH|UO|NC|UC|UR|LR)`
	)
	rules := []struct {
		re   *regexp.Regexp
		some bool
	}{
		{regexp.MustCompile(`^503;-;POST;.+$`), false},
		{regexp.MustCompile(`^0;-;POST;.*overload$`), false},
		{regexp.MustCompile(`^0;` + never + `(?:,` + never + `)*;POST;.+$`), false},
		{regexp.MustCompile(`^0;` + begun + `(?:,` + begun + `)*;POST;.+$`), true},
		{regexp.MustCompile(`^0;` + begun + `(?:,` + begun + `)*;POST;.*(?:REFUSED_STREAM|remote_refused_stream_reset).*$`), false},
	}
	rnd := rand.New(rand.NewPCG(5, 7))
	words := []string{"0", "503", "200", "-", "UF", "UH", "UO", "NC", "UC", "UR", "LR", "UT", "DC", ";", ";", ";", ";", ",", "POST", "POST", "overload", "REFUSED_STREAM", "x", "{", " "}
	hits := 0
	for range 20_000 {
		var b strings.Builder
		if rnd.IntN(4) > 0 { // nearly right
			flags := []string{"-", "UF", "UC", "UR,UF", "UT", "LR,", "UH,NC"}
			fmt.Fprintf(&b, "%s;%s;%s;", words[rnd.IntN(3)], flags[rnd.IntN(len(flags))], []string{"POST", "POST", "PUT"}[rnd.IntN(3)])
		}
		for range rnd.IntN(5) {
			b.WriteString(words[rnd.IntN(len(words))])
		}
		v := b.String()
		o, ok := parseOutcome([]byte(v), []byte("POST"))
		for _, idempotent := range []bool{false, true} {
			want := false
			for _, r := range rules {
				want = want || r.re.MatchString(v) && (idempotent || !r.some)
			}
			if got := ok && o.retriable(idempotent); got != want {
				t.Fatalf("%q, idempotent %v: retried %v, want %v", v, idempotent, got, want)
			}
			if want {
				hits++
			}
		}
	}
	if hits < 1_000 {
		t.Errorf("only %d were to be retried", hits)
	}
}

// TestObserved: what ends without an answer is judged by the same table; streams beyond
// the last of a GOAWAY are refused (case 67).
func TestObserved(t *testing.T) {
	for _, tt := range []struct {
		code    exchange.Code
		reached bool
		cause   error
		post    bool
		get     bool
	}{
		{exchange.Connect, false, nil, true, true},
		{exchange.Unsent, true, nil, true, true},
		{exchange.Refused, true, nil, true, true},
		{exchange.Refused, false, engine.ErrHopFull, true, true},
		{exchange.Closed, true, nil, false, true},
		{exchange.Closed, true, engine.ErrSilent, false, true},
		{exchange.Closed, false, errEndpointGone, true, true},
		{exchange.TooLarge, true, nil, false, true},
		{exchange.Protocol, true, nil, false, false},
		{exchange.Timeout, true, nil, false, false},
		{exchange.Internal, true, nil, false, false},
		{exchange.Cancel, true, nil, false, false},
	} {
		o := observed(tt.code, tt.reached, tt.cause)
		if post, get := o.retriable(false), o.retriable(true); post != tt.post || get != tt.get {
			t.Errorf("%s, reached %v, %v: POST retried %v, GET %v", tt.code, tt.reached, tt.cause, post, get)
		}
	}
}

// TestBackoff: full jitter below 25, 50, 100, 200 and then 250 ms (contract 5.7).
func TestBackoff(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for n, most := range []time.Duration{25, 50, 100, 200, 250, 250, 250} {
		most *= time.Millisecond
		var sum, top time.Duration
		for range 4_000 {
			d := backoff(n, rnd.Uint64())
			if d < 0 || d >= most {
				t.Fatalf("retry %d waits %v", n, d)
			}
			sum, top = sum+d, max(top, d)
		}
		if mean := sum / 4_000; mean < most*46/100 || mean > most*54/100 || top < most*99/100 {
			t.Errorf("retry %d waits %v on average, %v at most", n, mean, top)
		}
	}
	if d := backoff(255, ^uint64(0)); d >= 250*time.Millisecond || d < 0 {
		t.Errorf("retry 255 waits %v", d)
	}
}

// FuzzOutcome: the field comes from another proxy. Nothing that is not exactly one is
// ever retried, and what is retried names its own method.
func FuzzOutcome(f *testing.F) {
	for _, s := range []string{"200;-;GET;via_upstream", "0;UF,UH;GET;x;y", "503;-;GET;overload", "0;-;GET;overload", "0;UR;GET;{REFUSED_STREAM}", ";;;", "0;,;GET;x"} {
		f.Add([]byte(s))
	}
	whole := regexp.MustCompile(`^(?:0|[1-9][0-9]{2});(?:-|[A-Z]{2}(?:,[A-Z]{2})*);GET;[\s\S]+$`)
	f.Fuzz(func(t *testing.T, b []byte) {
		o, ok := parseOutcome(b, []byte("GET"))
		if ok && !whole.Match(b) {
			t.Fatalf("%q passes for an outcome", b)
		}
		if o.retriable(false) && !o.retriable(true) {
			t.Fatalf("%q is retried for POST alone", b)
		}
	})
}
