package outbound

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// visitor asks for paths and carries the cookies, or the field, that it was given.
type visitor struct {
	t   *testing.T
	o   *Outbound
	c   *conn
	now time.Time

	cookies map[string]string // by name
	fields  map[string]string
	set     []string // the last Set-Cookie lines
}

func newVisitor(t *testing.T, mesh string) *visitor {
	t.Helper()
	k := &visitor{t: t, now: time.Unix(1_800_000_000, 0), cookies: map[string]string{}, fields: map[string]string{}}
	var store snapshot.Store
	k.o = New(Config{Store: &store})
	k.o.now = func() time.Time { return k.now }
	f, err := model.ParseFlow("shop/web > 10.96.0.1:8080 http1")
	if err != nil {
		t.Fatal(err)
	}
	k.c = &conn{o: k.o, pod: &Pod{Context: t.Context()}, flow: f, st: k.o.loops.Make(stillLoop(t, nil))}
	k.c.info = engine.ConnInfo{User: k.c}
	k.apply(mesh)
	return k
}

func (k *visitor) apply(mesh string) {
	k.t.Helper()
	s, problems := compile.Compile(modeltest.Mesh(k.t, mesh))
	if len(problems) != 1 || !strings.Contains(fmt.Sprint(problems[0]), "shop/gone") {
		k.t.Fatal(problems)
	}
	k.o.cfg.Store.Swap(s)
}

// visit is one request with its answer: "pod backend", and what the client was told.
func (k *visitor) visit(path string, status int, more ...string) string {
	k.t.Helper()
	h, err := model.ParseRequest("GET cart:8080" + path)
	if err != nil {
		k.t.Fatal(err)
	}
	for i := 0; i < len(more); i += 2 {
		h.Add([]byte(more[i]), []byte(more[i+1]))
	}
	var pairs []string
	for name, value := range k.cookies {
		pairs = append(pairs, name+"="+value)
	}
	slices.Sort(pairs)
	if len(pairs) > 0 {
		h.Add([]byte("cookie"), []byte(strings.Join(pairs, "; ")))
	}
	for name, value := range k.fields {
		h.Add([]byte(name), []byte(value))
	}
	rq := &reqState{snap: k.o.cfg.Store.Load(), path: h.Path}
	rq.v = decide.Route(rq.snap, &k.c.flow, &h, k.c.st.rnd.Uint32(), nil)
	if m := rq.v.Matched; m != nil && m.Persistence != nil {
		k.o.resumeSession(k.c, rq, &h)
	}
	if rq.v.Action != decide.Forward {
		return fmt.Sprint(rq.v.Status)
	}
	e := k.c.st.pick(k.c.pod, rq)
	if e == nil {
		return "none"
	}
	rq.endpoint = e
	answer := httpmsg.Head{Status: status}
	if m := rq.v.Matched; m != nil && m.Persistence != nil {
		k.o.setSessionToken(rq, &answer)
	}
	k.set = nil
	for _, f := range answer.Fields {
		if string(f.Name) == "set-cookie" {
			k.set = append(k.set, string(f.Value))
			pair, _, _ := strings.Cut(string(f.Value), ";")
			name, value, _ := strings.Cut(pair, "=")
			k.cookies[name] = value
		} else {
			k.fields[string(f.Name)] = string(f.Value)
			k.set = append(k.set, "field")
		}
	}
	return e.Pod + " " + rq.v.Backend.Name
}

const stickyMesh = `
service shop/cart 10.96.0.1
pods shop/cart 8080,9090 ip=10.1.0.1 pod=cart-1
pods shop/cart 8080,9090 ip=10.1.0.2 pod=cart-2
pods shop/cart 8080,9090 ip=10.1.0.3 pod=cart-3 HEALTH
pods shop/cart 8080,9090 ip=10.1.0.4 pod=cart-4
service shop/new 10.96.0.2
pods shop/new 8080 ip=10.1.1.1 pod=new-1
pods shop/new 8080 ip=10.1.1.2 pod=new-2
local shop/web
route shop/cart cart:8080
rule name=plain match=prefix:/plain sticky=sid
rule name=odd match=prefix:/o;d sticky=odd
rule name=all match=regex:/re.* sticky=
rule name=perm match=prefix:/perm sticky=perm;absolute=1h;lasting
rule name=idle match=prefix:/idle sticky=idle;idle=1m;absolute=1h
rule name=head match=prefix:/head sticky=x-session;header
rule name=split match=prefix:/split to=cart:8080*1 to=cart:9090*1 to=new:8080*2 sticky=split
rule name=part match=prefix:/part to=cart:8080*WEIGHT to=new:8080*1 to=gone:8080*1!nothing sticky=part
`

func mesh(health string, weight int) string {
	return strings.NewReplacer("HEALTH", health, "WEIGHT", fmt.Sprint(weight)).Replace(stickyMesh)
}

// TestSessions: GEP-1619. A client that shows what it was given comes back to where it was.
func TestSessions(t *testing.T) {
	stays := func(k *visitor, path string) (where string) {
		k.t.Helper()
		where = k.visit(path, 200)
		for range 50 {
			if got := k.visit(path, 200); got != where {
				k.t.Fatalf("%s: at %s, then at %s", path, where, got)
			}
		}
		return where
	}
	t.Run("cookie", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		k.visit("/plain/a", 200)
		if len(k.set) != 1 || !regexp.MustCompile(`^sid=[A-Za-z0-9_-]{27}; Path=/plain; HttpOnly$`).MatchString(k.set[0]) {
			t.Errorf("given %q", k.set)
		}
		stays(k, "/plain/b")
		if k.set != nil {
			t.Errorf("given once more: %q", k.set)
		}
		places := map[string]bool{}
		for range 100 {
			clear(k.cookies)
			places[k.visit("/plain", 200)] = true
		}
		if len(places) != 4 {
			t.Errorf("new clients come to %v", places)
		}
		clear(k.cookies)
		k.visit("/o;d", 200)
		if !strings.Contains(k.set[0], "; Path=/; ") {
			t.Errorf("given %q", k.set)
		}
		k.visit("/regular", 200)
		if !regexp.MustCompile(`^aether-session-[0-9a-f]{8}=[A-Za-z0-9_-]{27}; Path=/; HttpOnly$`).MatchString(k.set[0]) {
			t.Errorf("given %q", k.set)
		}
		stays(k, "/regular")
	})
	t.Run("among other cookies", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		where := k.visit("/plain", 200)
		token := k.cookies["sid"]
		clear(k.cookies)
		for _, cookie := range []string{"a=b; sid=" + token, "sid=" + token + ";a=b", `x; sid="` + token + `"`, "sid=; sid=short; sid=" + token, "SID=x; sid=" + token + ";"} {
			for range 20 {
				if got := k.visit("/plain", 200, "cookie", cookie); got != where {
					t.Fatalf("%s: at %s, want %s", cookie, got, where)
				}
				clear(k.cookies)
			}
		}
		for _, cookie := range []string{"xsid=" + token, "sid=" + token + "x", "sid=" + token[:26], "sid=" + token[:26] + "!", "=" + token, token, "sid=a; sid=a; sid=a; sid=a; sid=" + token} {
			k.visit("/plain", 200, "cookie", cookie)
			if len(k.set) != 1 {
				t.Errorf("%s is taken for a session", cookie)
			}
			clear(k.cookies)
		}
	})
	t.Run("permanent", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		k.visit("/perm", 200)
		if !strings.HasSuffix(k.set[0], "; Path=/perm; Max-Age=3600; HttpOnly") {
			t.Errorf("given %q", k.set)
		}
		k.now = k.now.Add(time.Hour)
		if k.visit("/perm", 200); k.set != nil {
			t.Errorf("given again in time: %q", k.set)
		}
		k.now = k.now.Add(time.Second)
		if k.visit("/perm", 200); len(k.set) != 1 {
			t.Error("older than absoluteTimeout, and not ended")
		}
	})
	t.Run("idle", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		where := k.visit("/idle", 200)
		first, _ := parseToken([]byte(k.cookies["idle"]))
		for range 60 { // each use makes it last longer, up to the absolute end
			k.now = k.now.Add(time.Minute)
			if got := k.visit("/idle", 200); got != where || len(k.set) != 1 {
				t.Fatalf("at %s, want %s; given %q", got, where, k.set)
			}
		}
		tok, _ := parseToken([]byte(k.cookies["idle"]))
		if tok.issued != first.issued || tok.used != first.used+3600 {
			t.Errorf("began %d and was used %d, after an hour it says %d and %d", first.issued, first.used, tok.issued, tok.used)
		}
		k.now = k.now.Add(time.Second)
		k.visit("/idle", 200)
		if next, _ := parseToken([]byte(k.cookies["idle"])); next.issued == tok.issued {
			t.Error("older than absoluteTimeout, and not ended")
		}
		tok, _ = parseToken([]byte(k.cookies["idle"]))
		k.now = k.now.Add(61 * time.Second)
		k.visit("/idle", 200)
		if next, _ := parseToken([]byte(k.cookies["idle"])); next.issued == tok.issued {
			t.Error("idle for longer than idleTimeout, and not ended")
		}
		k.now = k.now.Add(-10 * time.Second) // another node's clock
		where = k.visit("/idle", 200)
		if got := k.visit("/idle", 200); got != where {
			t.Error("a clock that is behind ends a session")
		}
	})
	t.Run("header", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		k.visit("/head", 200)
		if len(k.fields["x-session"]) != tokenText || len(k.cookies) != 0 {
			t.Errorf("given %v %v", k.fields, k.cookies)
		}
		stays(k, "/head")
	})
	t.Run("endpoint gone, unhealthy or draining", func(t *testing.T) {
		for _, health := range []string{"health=unhealthy", "health=draining", "weight=0"} {
			k := newVisitor(t, mesh("", 1))
			for k.visit("/plain", 200) != "cart-3 shop/cart:8080" {
				clear(k.cookies)
			}
			k.apply(mesh(health, 1))
			if got := stays(k, "/plain"); got == "cart-3 shop/cart:8080" {
				t.Errorf("%s: stays at it", health)
			}
			k.visit("/plain", 200)
			if k.set != nil {
				t.Errorf("%s: no session at the new place", health)
			}
		}
	})
	t.Run("endpoint ejected", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		where := stays(k, "/plain")
		st, b := k.c.st, k.o.cfg.Store.Load().Backends()
		i := slices.IndexFunc(b, func(b *snapshot.Backend) bool { return b.Name == "shop/cart:8080" })
		all := k.o.cfg.Store.Load().Endpoints(b[i]).All()
		e := all[slices.IndexFunc(all, func(e *snapshot.Endpoint) bool { return strings.HasPrefix(where, e.Pod+" ") })]
		d := st.of(k.c.pod).table.Dest(b[i])
		for event := uint64(1); d.Host(e.Addr).EjectedFor(st.l.Now()) == 0; event++ {
			d.Failed(d.Host(e.Addr), st.l.Now(), time.Second, event, len(all))
		}
		if got := stays(k, "/plain"); got == where {
			t.Error("stays at it")
		}
	})
	t.Run("a failure binds nobody", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		if k.visit("/plain", 500); k.set != nil {
			t.Errorf("given %q", k.set)
		}
	})
	t.Run("pinned", func(t *testing.T) { // the pin is stronger, and no session
		k := newVisitor(t, mesh("", 1))
		where := stays(k, "/plain")
		for _, pod := range []string{"cart-1", "cart-2"} {
			if got := k.visit("/plain", 200, "x-aether-pod", pod); got != pod+" shop/cart:8080" || k.set != nil {
				t.Errorf("at %s, given %q", got, k.set)
			}
		}
		if got := k.visit("/plain", 200); got != where {
			t.Errorf("at %s after a pin, want %s", got, where)
		}
	})
	t.Run("across backends", func(t *testing.T) {
		k := newVisitor(t, mesh("", 1))
		seen := map[string]bool{}
		for range 40 {
			clear(k.cookies)
			seen[strings.Fields(stays(k, "/split"))[1]] = true
		}
		if len(seen) != 3 {
			t.Errorf("sessions at %v only", seen)
		}
	})
	t.Run("a share without a backend", func(t *testing.T) { // a session is none of those that the broken share costs
		k := newVisitor(t, mesh("", 1))
		for range 10 {
			clear(k.cookies)
			for !strings.HasPrefix(k.visit("/part", 200), "cart") {
				clear(k.cookies)
			}
			stays(k, "/part")
		}
		k.apply(mesh("", 0)) // no weight, no request (case 151)
		for range 20 {
			if got := k.visit("/part", 200); strings.HasPrefix(got, "cart") {
				t.Fatalf("at %s, which has no weight", got)
			}
		}
	})
	t.Run("nothing to be made up", func(t *testing.T) { // a token leads to an endpoint of the rule, or nowhere
		k := newVisitor(t, mesh("", 1))
		where := k.visit("/split", 200)
		for !strings.HasPrefix(where, "new") {
			clear(k.cookies)
			where = k.visit("/split", 200)
		}
		k.cookies = map[string]string{"sid": k.cookies["split"]}
		if got := k.visit("/plain", 200); strings.HasPrefix(got, "new") || len(k.set) != 1 {
			t.Errorf("led to %s", got)
		}
	})
}

// TestSessionCosts: a request that comes back to its session costs no allocation.
func TestSessionCosts(t *testing.T) {
	k := newVisitor(t, mesh("", 1))
	k.visit("/idle", 200)
	h, err := model.ParseRequest("GET cart:8080/idle")
	if err != nil {
		t.Fatal(err)
	}
	h.Add([]byte("cookie"), []byte("idle="+k.cookies["idle"]))
	rq := &reqState{snap: k.o.cfg.Store.Load(), path: h.Path}
	answer := httpmsg.Head{Fields: make([]httpmsg.Field, 0, 8)}
	k.now = k.now.Add(time.Second)
	if n := testing.AllocsPerRun(1000, func() {
		*rq = reqState{snap: rq.snap, path: rq.path, scratch: rq.scratch[:0]}
		rq.v = decide.Route(rq.snap, &k.c.flow, &h, k.c.st.rnd.Uint32(), nil)
		k.o.resumeSession(k.c, rq, &h)
		rq.endpoint = k.c.st.pick(k.c.pod, rq)
		answer.Fields, answer.Status = answer.Fields[:0], 200
		k.o.setSessionToken(rq, &answer)
		if len(answer.Fields) != 1 {
			t.Fatal("no new cookie")
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}
