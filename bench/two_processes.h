// The two sides of a bridge, each a process.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

// Forks two processes that exit with what side(0) and side(1) return; 0 if both returned 0, else 1. To be called before
// any use of CUDA, which does not survive a fork. `side` must not throw.
template <class Side>
int in_two_processes(Side&& side) {
  pid_t children[2];
  for (int which = 0; which < 2; ++which) {
    children[which] = fork();
    if (children[which] != 0) continue;
    const int code = side(which);
    std::fflush(stdout);
    _exit(code);
  }
  int failures = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failures += status == 0 ? 0 : 1;
  }
  return failures == 0 ? 0 : 1;
}
