package modeltest

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/model"
)

// rule of the last route. Its words:
//
//	all                     nothing: a rule needs a word
//	name=new                its name
//	invalid=why             it cannot be honoured
//	match=...               one match; see match
//	to=shop/cart:8080*90    a backend: service, port, weight (1); "!why" at the end: invalid, "?": no ReferenceGrant
//	timeout=10s attempt=2s  of the whole, of each attempt
//	retry=...               see retry
//	sticky=...              session persistence; see sticky
//	again                   a filter after it is a new one, of the same kind too
//
// and its filters, in the order written; with a b before it, of the backend
// last named:
//
//	set=x-a:1 add=x-a:1 remove=x-a       of the request
//	rset=x-a:1 radd=x-a:1 rremove=x-a    of the answer
//	redirect=... rewrite=...             see redirect and rewrite
//	mirror=shop/cart:8080*1/2            a backend and the share that goes there, all by default
//	cors=...                             see cors
//	use=name                             an HTTPFilter of the route's namespace
func (p *parser) rule(words []string) error {
	if len(p.m.Routes) == 0 {
		return fmt.Errorf("no route before it")
	}
	r := &p.m.Routes[len(p.m.Routes)-1]
	var rule model.Rule
	again := false
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok {
			switch w {
			case "all":
			case "again":
				again = true
			default:
				return fmt.Errorf("%q is unknown", w)
			}
			continue
		}
		var err error
		switch k {
		case "name":
			rule.Name = v
		case "invalid":
			rule.Invalid = v
		case "match":
			var m model.Match
			m, err = match(v)
			rule.Matches = append(rule.Matches, m)
		case "to":
			var ref model.BackendRef
			ref, err = backend(v, r.Namespace)
			rule.Backends = append(rule.Backends, ref)
		case "timeout":
			rule.Timeouts.Request, err = time.ParseDuration(v)
		case "attempt":
			rule.Timeouts.Backend, err = time.ParseDuration(v)
		case "retry":
			rule.Retry, err = retry(v)
		case "sticky":
			rule.Persistence, err = sticky(v)
		default:
			of := &rule.Filters
			if rest, ok := strings.CutPrefix(k, "b"); ok {
				if len(rule.Backends) == 0 {
					return fmt.Errorf("%q before any to=", w)
				}
				k, of = rest, &rule.Backends[len(rule.Backends)-1].Filters
			}
			err = ruleFilter(of, k, v, r.Namespace, again)
			again = false
		}
		if err != nil {
			return fmt.Errorf("%q: %w", w, err)
		}
	}
	r.Rules = append(r.Rules, rule)
	return nil
}

// backend: service:port*weight!invalid.
func backend(v, ns string) (ref model.BackendRef, err error) {
	v, why, _ := strings.Cut(v, "!")
	v, ungranted := strings.CutSuffix(v, "?")
	v, weight, has := strings.Cut(v, "*")
	ref = model.BackendRef{Weight: 1, Invalid: why, Ungranted: ungranted}
	if ref.Service, ref.Port, err = target(v, ns); err != nil {
		return ref, err
	}
	if has {
		ref.Weight, err = number32(weight)
	}
	return ref, err
}

func number32(w string) (uint32, error) {
	x, err := strconv.ParseUint(w, 10, 32)
	return uint32(x), err
}

// match: parts joined by &:
//
//	GET               a method
//	exact:/p prefix:/p regex:/p[0-9]+
//	h:name=value hr:name=regex      a field
//	q:name=value qr:name=regex      a parameter
//	grpc:service/method grpcr:service/method    either part may be empty; r: regular expressions
func match(v string) (m model.Match, err error) {
	for part := range strings.SplitSeq(v, "&") {
		k, x, ok := strings.Cut(part, ":")
		if !ok {
			m.Method = part
			continue
		}
		switch k {
		case "prefix":
			m.PathKind, m.Path = model.PathPrefix, x
		case "exact":
			m.PathKind, m.Path = model.PathExact, x
		case "regex":
			m.PathKind, m.Path = model.PathRegex, x
		case "h", "hr", "q", "qr":
			n, val, _ := strings.Cut(x, "=")
			value := model.ValueMatch{Name: n, Value: val, Regex: k[len(k)-1] == 'r'}
			if k[0] == 'h' {
				m.Headers = append(m.Headers, value)
			} else {
				m.Query = append(m.Query, value)
			}
		case "grpc", "grpcr":
			service, method, _ := strings.Cut(x, "/")
			m.GRPC = &model.GRPCMatch{Service: service, Method: method, Regex: k == "grpcr"}
		default:
			return m, fmt.Errorf("%q is no part of a match", part)
		}
	}
	return m, nil
}

// retry: statuses joined by commas, or "any" for none named, then any of ;attempts=3 ;backoff=100ms.
func retry(v string) (*model.Retry, error) {
	codes, rest, _ := strings.Cut(v, ";")
	out := &model.Retry{}
	for c := range strings.SplitSeq(codes, ",") {
		if codes == "any" {
			break
		}
		n, err := number(c)
		if err != nil {
			return nil, err
		}
		out.Codes = append(out.Codes, n)
	}
	return out, options(rest, func(k, v string) (err error) {
		switch k {
		case "attempts":
			var n uint64
			n, err = strconv.ParseUint(v, 10, 8)
			out.Attempts = uint8(n)
		case "backoff":
			out.Backoff, err = time.ParseDuration(v)
		default:
			err = errUnknown(k)
		}
		return err
	})
}

// sticky: the name, then any of ;header ;absolute=1h ;idle=5m ;lasting.
func sticky(v string) (*model.Persistence, error) {
	name, rest, _ := strings.Cut(v, ";")
	out := &model.Persistence{Name: name}
	return out, options(rest, func(k, v string) (err error) {
		switch k {
		case "header":
			out.Header = true
		case "lasting":
			out.Lasting = true
		case "absolute":
			out.Absolute, err = time.ParseDuration(v)
		case "idle":
			out.Idle, err = time.ParseDuration(v)
		default:
			err = errUnknown(k)
		}
		return err
	})
}

// options calls f for each part of a list joined by semicolons, of the form key or key=value.
func options(list string, f func(k, v string) error) error {
	for part := range strings.SplitSeq(list, ";") {
		if part == "" {
			continue
		}
		k, v, _ := strings.Cut(part, "=")
		if err := f(k, v); err != nil {
			return err
		}
	}
	return nil
}

func errUnknown(w string) error { return fmt.Errorf("%q is unknown", w) }

// ruleFilter adds what one word says to a list of filters.
func ruleFilter(of *[]model.Filter, k, v, ns string, again bool) error {
	f := model.Filter{}
	var err error
	switch k {
	case "set", "add", "remove", "rset", "radd", "rremove":
		kind, op := model.RequestHeaders, k
		if k != "remove" {
			if rest, ok := strings.CutPrefix(k, "r"); ok {
				kind, op = model.ResponseHeaders, rest
			}
		}
		g := modifier(of, kind, again)
		field, value, _ := strings.Cut(v, ":")
		switch op {
		case "set":
			g.Set = append(g.Set, model.HeaderValue{Name: field, Value: value})
		case "add":
			g.Add = append(g.Add, model.HeaderValue{Name: field, Value: value})
		default:
			g.Remove = append(g.Remove, v)
		}
		return nil
	case "redirect":
		f.Kind = model.Redirect
		f.Redirect, err = redirect(v)
	case "rewrite":
		f.Kind = model.Rewrite
		f.Rewrite, err = rewrite(v)
	case "mirror":
		f.Kind = model.Mirror
		f.Mirror, err = mirror(v, ns)
	case "cors":
		f.Kind = model.CORS
		f.CORS, err = cors(v)
	case "use":
		f.Kind, f.Extension = model.Extension, v
	default:
		return errUnknown(k)
	}
	*of = append(*of, f)
	return err
}

// modifier is the last filter of a kind, or a new one.
func modifier(of *[]model.Filter, kind model.FilterKind, again bool) *model.Filter {
	if !again {
		for i := len(*of) - 1; i >= 0; i-- {
			if (*of)[i].Kind == kind {
				return &(*of)[i]
			}
		}
	}
	*of = append(*of, model.Filter{Kind: kind})
	return &(*of)[len(*of)-1]
}

// redirect: any of scheme=https ;host=h ;port=8443 ;path=/full ;prefix=/part
// ;code=301, joined by semicolons; 302 by default. A lone "-" changes nothing.
func redirect(v string) (*model.RedirectFilter, error) {
	out := &model.RedirectFilter{Status: 302}
	return out, options(v, func(k, v string) (err error) {
		switch k {
		case "-":
		case "scheme":
			out.Scheme = v
		case "host":
			out.Host = v
		case "port":
			out.Port, err = number(v)
		case "path":
			out.Path = model.PathEdit{Kind: model.PathFull, Value: v}
		case "prefix":
			out.Path = model.PathEdit{Kind: model.PathPrefixPart, Value: v}
		case "code":
			out.Status, err = strconv.Atoi(v)
		default:
			err = errUnknown(k)
		}
		return err
	})
}

// rewrite: any of host=h ;path=/full ;prefix=/part, joined by semicolons.
func rewrite(v string) (*model.RewriteFilter, error) {
	out := &model.RewriteFilter{}
	return out, options(v, func(k, v string) error {
		switch k {
		case "host":
			out.Host = v
		case "path":
			out.Path = model.PathEdit{Kind: model.PathFull, Value: v}
		case "prefix":
			out.Path = model.PathEdit{Kind: model.PathPrefixPart, Value: v}
		default:
			return errUnknown(k)
		}
		return nil
	})
}

// mirror: service:port*1/2!invalid; without the share, all.
func mirror(v, ns string) (*model.MirrorFilter, error) {
	v, why, _ := strings.Cut(v, "!")
	v, share, has := strings.Cut(v, "*")
	out := &model.MirrorFilter{Numerator: 1, Denominator: 1}
	var err error
	if out.Backend, err = backend(v, ns); err != nil {
		return out, err
	}
	out.Backend.Invalid = why
	if has {
		a, b, _ := strings.Cut(share, "/")
		if out.Numerator, err = number32(a); err == nil {
			out.Denominator, err = number32(b)
		}
	}
	return out, err
}

// cors: origins joined by commas, then any of ;methods=GET,POST ;headers=x-a,x-b
// ;expose=x-c ;age=60s ;credentials.
func cors(v string) (*model.CORSFilter, error) {
	origins, rest, _ := strings.Cut(v, ";")
	out := &model.CORSFilter{Origins: strings.Split(origins, ",")}
	return out, options(rest, func(k, v string) (err error) {
		switch k {
		case "methods":
			out.Methods = strings.Split(v, ",")
		case "headers":
			out.Headers = strings.Split(v, ",")
		case "expose":
			out.Expose = strings.Split(v, ",")
		case "age":
			out.MaxAge, err = time.ParseDuration(v)
		case "credentials":
			out.Credentials = true
		default:
			err = errUnknown(k)
		}
		return err
	})
}

// filter is an HTTPFilter: its name, then
//
//	scope=route|chain|inbound     route by default
//	target=cart,web               services
//	invalid=why                   it cannot be honoured
//
// and one of
//
//	rbac [deny] [audit] policy=...                  see policy
//	authz [disabled] [nobody] ctx=key:value
//	metadata=x-version:version[:namespace]          a field and the key its value selects by; more than one
//	request=set:x-a:1 query=remove:x response=...   changes in order: append, absent, set, replace, remove
func (p *parser) filter(words []string) error {
	n, err := name(words[0], "")
	if err != nil {
		return err
	}
	f := model.HTTPFilter{Namespace: n.Namespace, Name: n.Name, Scope: model.ScopeRoute}
	rbac := func() *model.RBAC {
		if f.RBAC == nil {
			f.RBAC = &model.RBAC{}
		}
		return f.RBAC
	}
	authz := func() *model.ExtAuthz {
		if f.ExtAuthz == nil {
			f.ExtAuthz = &model.ExtAuthz{}
		}
		return f.ExtAuthz
	}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		switch k {
		case "scope":
			switch v {
			case "route":
				f.Scope = model.ScopeRoute
			case "chain":
				f.Scope = model.ScopeChain
			case "inbound":
				f.Scope = model.ScopeInbound
			default:
				err = fmt.Errorf("%q is no scope", v)
			}
		case "target":
			for item := range strings.SplitSeq(v, ",") {
				var t model.ServiceName
				if t, err = name(item, n.Namespace); err != nil {
					break
				}
				f.Targets = append(f.Targets, t)
			}
		case "invalid":
			f.Invalid = v
		case "rbac":
			rbac()
		case "deny":
			rbac().Deny = true
		case "audit":
			rbac().Audit = true
		case "policy":
			var of model.Policy
			of, err = policy(v)
			rbac().Policies = append(rbac().Policies, of)
		case "authz":
			authz()
		case "disabled":
			authz().Disabled = true
		case "nobody":
			authz().NoBody = true
		case "ctx":
			if authz().ContextExtensions == nil {
				authz().ContextExtensions = map[string]string{}
			}
			key, value, _ := strings.Cut(v, ":")
			authz().ContextExtensions[key] = value
		case "metadata":
			header, rest, _ := strings.Cut(v, ":")
			key, ns, _ := strings.Cut(rest, ":")
			if ns == "" {
				ns = "envoy.lb"
			}
			f.HeaderToMetadata = append(f.HeaderToMetadata, model.HeaderToMetadata{Header: header, Key: key, Namespace: ns})
		case "request", "query", "response":
			var op model.MutationOp
			op, err = mutation(v)
			if f.Mutation == nil {
				f.Mutation = &model.Mutation{}
			}
			of := map[string]*[]model.MutationOp{"request": &f.Mutation.Request, "query": &f.Mutation.Query, "response": &f.Mutation.Response}[k]
			*of = append(*of, op)
		default:
			err = errUnknown(w)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", w, err)
		}
	}
	p.m.Filters = append(p.m.Filters, f)
	return nil
}

// policy: its name, then any of ;id:spiffe://... ;ns:shop (principals) ;path:/p ;method:GET (permissions).
func policy(v string) (model.Policy, error) {
	name, rest, _ := strings.Cut(v, ";")
	out := model.Policy{Name: name}
	for part := range strings.SplitSeq(rest, ";") {
		k, x, _ := strings.Cut(part, ":")
		switch k {
		case "":
		case "id":
			out.Principals = append(out.Principals, model.Principal{SPIFFEID: x})
		case "ns":
			out.Principals = append(out.Principals, model.Principal{Namespace: x})
		case "path":
			out.Permissions = append(out.Permissions, model.Permission{PathPrefix: x})
		case "method":
			out.Permissions = append(out.Permissions, model.Permission{Method: x})
		default:
			return out, errUnknown(part)
		}
	}
	return out, nil
}

// mutation: append:name:value, absent, set, replace, or remove:name.
func mutation(v string) (op model.MutationOp, err error) {
	kind, rest, _ := strings.Cut(v, ":")
	op.Name, op.Value, _ = strings.Cut(rest, ":")
	switch kind {
	case "append":
		op.Kind = model.AppendIfExistsOrAdd
	case "absent":
		op.Kind = model.AddIfAbsent
	case "set":
		op.Kind = model.OverwriteIfExistsOrAdd
	case "replace":
		op.Kind = model.OverwriteIfExists
	case "remove":
		op.Kind = model.RemoveAll
	default:
		err = fmt.Errorf("%q is no change: append, absent, set, replace or remove", kind)
	}
	return op, err
}
